"""What a program comes to, by eager and in a mode, and how two of them differ."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fused_eager import fused_eager
from fused_eager.compiling import background
from fused_eager.tracing import trace

# How much further from the truth than eager a result may be whose rounding errors are larger than the tolerance.
WORSE = 4.0


def own(tree: Any) -> Any:
    """The same arguments over memory of their own: geometry, aliasing and `requires_grad` as they were."""
    try:
        return copy.deepcopy(tree)
    except (RuntimeError, TypeError):

        def clone(x: Any) -> Any:
            return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

        return tree_map(clone, tree)


def is_float(t: torch.Tensor) -> bool:
    """Whether a tensor holds numbers that are rounded."""
    return t.dtype.is_floating_point or t.dtype.is_complex


def outcome(program: Callable[[], list[Any]], mode: str | None) -> list[Any] | Exception:
    """What a program returns, or raises, by eager (None) or in a mode, or "auto": fused, and met for the first time."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if mode is None:
                return program()
            if mode == "auto":
                trace.MEMORY.forget()
                background.FORMS.clear()
                with fused_eager(mode="fused", progress=False, cache="off", compile="auto", native="never"):
                    return program()
            # Compiled before it runs, and never left to ATen: it is XLA's results that are in question.
            with fused_eager(mode=mode, progress=False, cache="off", compile="wait", native="never"):
                return program()
    except Exception as error:
        return error


def as_near(
    want: list[Any], got: list[Any], truth: list[Any], ulps: float = 1.0, nudged: Sequence[list[Any]] = ()
) -> bool:
    """Whether results are about as near to `truth`, which was computed in float64, as eager's are, or as near as
    eager's `nudged` ones.

    `ulps` of the largest number are nothing in any case.
    """
    if len(truth) != len(want):
        return False
    for a, b, t, *others in zip(want, got, truth, *nudged, strict=True):
        if not isinstance(a, torch.Tensor) or not is_float(a):
            if difference([a], [b], {"rtol": 0.0, "atol": 0.0}):
                return False
            continue
        if a.shape != t.shape or not a.numel():
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return False
        fine = torch.isfinite(a) & torch.isfinite(t)
        if not fine.any():
            continue
        off, ours, *moved = [(x.detach().to(t.dtype) - t.detach())[fine].abs().max() for x in (a, b, *others)]
        ulp = torch.finfo(a.dtype).eps * t.detach()[fine].abs().max()
        if ours > max([WORSE * off, *moved]) + ulps * ulp:
            return False
    return True


def short(found: Any) -> str:
    """An outcome in a line."""
    return f"{type(found).__name__}: {str(found)[:300]}" if isinstance(found, Exception) else "no error"


def difference(
    want: list[Any], got: list[Any], tolerance: dict[str, float], values: bool = True, strides: bool = True
) -> str:
    """What distinguishes two lists of results; "" if nothing does."""
    if len(want) != len(got):
        return f"{len(got)} results instead of {len(want)}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if type(a) is not type(b):
            return f"result {i} is a {type(b).__name__} instead of a {type(a).__name__}"
        if not isinstance(a, torch.Tensor):
            if not _same(a, b):
                return f"result {i} is {b!r} instead of {a!r}"
            continue
        looks = [(t.dtype, t.layout, tuple(t.shape), t.requires_grad, _strides(t) if strides else None) for t in (a, b)]
        if looks[0] != looks[1]:
            return f"result {i} is {looks[1]} instead of {looks[0]}"
        if not values:
            continue
        try:
            exact = not is_float(a) or a.is_quantized
            torch.testing.assert_close(
                b, a, **({"rtol": 0, "atol": 0} if exact else _for(a, tolerance)), equal_nan=True, check_layout=True
            )
        except Exception as error:
            return f"values of result {i} of {len(want)}: {' '.join(str(error).split())[:300]}"
    return ""


def _for(t: torch.Tensor, tolerance: dict[str, float]) -> dict[str, float]:
    """The tolerance of the case, or that of the result's dtype where it is wider (a float32 op may return bfloat16)."""
    rtol, atol = torch.testing._comparison.default_tolerances(t.dtype)
    return {"rtol": max(rtol, tolerance["rtol"]), "atol": max(atol, tolerance["atol"])}


def _strides(t: torch.Tensor) -> Any:
    if t.layout is not torch.strided or t.is_nested:
        return None
    # The stride of a dimension that is never stepped along is nobody's promise, in torch's own tests neither.
    return tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1) if t.numel() else ()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and a != a:
        return b != b
    try:
        return bool(a == b) or type(a).__eq__ is object.__eq__
    except Exception:
        return True
