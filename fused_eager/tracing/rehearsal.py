"""Rehearsal: a call is made through ATen on zeros, and what it returns is seen.

Shape inference (`infer`) needs torch's compiler, a second of import, and FakeTensor accepts some calls that ATen
refuses, and gives some results other strides or dtypes. ATen itself knows. So small calls and unusual ones are
rehearsed; where it is known how much they can return at most, they need not be inferred before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.lowering import leaves
from fused_eager.fusion_rules.rule import rule_for
from fused_eager.fusion_rules.spec import Spec

from ..devices.device import SEEN_AS
from .infer import LOCK, Inferred, Unknown, call, described, first_line, is_loaded, silence, unknowable, why_unfit
from .sizes import most_returned

# Of operands that are not contiguous FakeTensor makes results of other strides than ATen: these are rehearsed, unless
# they are very large. tests/tracing/test_infer.py looks for them in op_db.
_STRIDING = (
    "_batch_norm_with_update _log_softmax_backward_data _native_batch_norm_legit _softmax_backward_data "
    "batch_norm_backward channel_shuffle copysign div floor_divide fmod remainder glu_backward heaviside "
    "huber_loss_backward ldexp log_sigmoid_forward logaddexp logaddexp2 logical_and logical_or logical_xor "
    "max_pool3d_with_indices max_unpool2d max_unpool3d mse_loss_backward native_batch_norm "
    "native_batch_norm_backward native_dropout_backward native_layer_norm_backward nll_loss2d_forward "
    "pixel_shuffle pixel_unshuffle pow reflection_pad2d reflection_pad2d_backward reflection_pad3d "
    "reflection_pad3d_backward replication_pad2d replication_pad2d_backward replication_pad3d "
    "replication_pad3d_backward smooth_l1_loss_backward special_xlog1py xlogy _fft_c2c _fft_r2c"
)
_OTHER_STRIDES = frozenset(f"aten::{name}" for name in _STRIDING.split())
SMALL = 2**16  # elements: a rehearsal costs next to nothing
LARGE = 2**24  # elements: above, a rehearsal would cost too much
IMPORT_S = 0.5  # seconds, about, that the import of what inference needs takes
HUGE = 2**28  # above, it would take memory that the program may need, even where shape inference cannot be trusted
OTHER_SHAPES = "a rehearsal returned other shapes than inferred"
OTHER_DTYPES = "a rehearsal returned other dtypes than inferred"
_WRITING = frozenset({"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"})
_USUAL = ({torch.float32}, {torch.float64})


class _Spent:
    """Seconds that rehearsals have taken which saved the import of what inference needs."""

    seconds = 0.0


def rehearse_alone(
    op: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> Inferred | Unknown | None:
    """What ATen returns for a small call, seen without any inference; None where only inference can say.

    Larger calls are rehearsed too, as long as all of it takes no longer than the import would.
    """
    unknown = unknowable(op, args, kwargs, tensors)
    if unknown is not None:
        return unknown
    if torch.device(kwargs.get("device") or SEEN_AS) != SEEN_AS:
        return None
    returned = most_returned(op, args, tensors)
    most = SMALL if is_loaded() or _Spent.seconds > IMPORT_S else LARGE
    if returned is None or returned + sum(map(_taken, tensors)) > most:
        return None
    began = time.perf_counter()
    # Ops of each element may refuse zeros (integers divided by them); places in a tensor are looked at by others.
    actors = [_filled(t, torch.ones if torch.Tag.pointwise in op.tags else torch.zeros) for t in tensors]
    _select(op, args, tensors, actors)
    try:
        with LOCK, silence():
            out = call(op, args, kwargs, actors)
    except Exception:
        return None  # it may take other values
    finally:
        _Spent.seconds += time.perf_counter() - began
    if any(a.shape != t.shape for a, t in zip(actors, tensors, strict=True)):
        return Unknown("ATen resizes an argument")
    if not all(a is None or isinstance(a, torch.Tensor) for a in leaves([out])):
        return None  # a number may depend on values
    found = described(out, actors)
    return found if isinstance(found, Inferred) and not found.alias else None


def rehearse(
    op: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], inferred: Inferred
) -> tuple[Inferred, str] | Unknown:
    """Run `op` once through ATen on zeros, to see whether it does what shape inference says.

    FakeTensor accepts some calls that ATen refuses (mixed dtypes, above all), and gives some outputs other strides or
    dtypes: the statistics of a layer norm in bfloat16 with weights in float32, as under autocast.
    Small calls, calls of unusual dtypes or strides, and those that make tensors of numbers alone (a window of integers,
    a complex number in floats) are rehearsed.

    Returns:
        What ATen really returns, and "" or the reason why the op's first real run should be ATen's as well. `Unknown`
        if ATen resizes an argument, of which shape inference has said nothing.
    """
    rule = rule_for(op)
    if rule is not None and rule.defines:
        return inferred, ""
    if inferred.alias:
        return inferred, ""
    if _elements(tensors, inferred) > _most(op, tensors):
        return inferred, "it is too large to rehearse, and its floats are of several dtypes" if _mixes(tensors) else ""
    actors = [_zeros(t) for t in tensors]
    _select(op, args, tensors, actors)
    try:
        with LOCK, silence():
            out = call(op, args, kwargs, actors)
    except Exception as error:
        return inferred, f"a rehearsal failed: {first_line(error)}"
    if any(a.shape != t.shape for a, t in zip(actors, tensors, strict=True)):
        return Unknown("ATen resizes an argument")
    own = {id(t) for t in actors}
    real = [t for t in leaves([out]) if isinstance(t, torch.Tensor) and id(t) not in own]
    unfit = why_unfit(real)
    if unfit:
        return Unknown(unfit)
    if [tuple(t.shape) for t in real] != [s.shape for s in inferred.fresh]:  # of some ops they depend on values
        return inferred, OTHER_SHAPES
    if op.namespace != "aten" and [t.dtype for t in real] != [s.dtype for s in inferred.fresh]:
        return inferred, OTHER_DTYPES
    specs = tuple(Spec(tuple(t.shape), t.dtype, tuple(t.stride()), t.device) for t in real)
    return Inferred(specs, inferred.template), ""


def rehearsed(
    op: Callable[..., Any], args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], small: bool = False
) -> bool:
    """Whether ATen takes a call of `op`, on zeros in place of its tensors; or on `small` ones, which an op that
    computes each element by itself takes as well. (Not of one element: of some of those numbers are not looked at.)"""
    actors = [torch.zeros((2,) * t.ndim, dtype=t.dtype, device=SEEN_AS) if small else _zeros(t) for t in tensors]
    try:
        with LOCK, silence():
            call(op, args, kwargs, actors)
    except Exception:
        return False
    return True


def _select(op: OpOverload, args: Any, tensors: list[torch.Tensor], actors: list[torch.Tensor]) -> None:
    """In a call that writes values where a mask is true, have it be true as often as there are values: ATen refuses
    others, and how many they are is looked at when the op runs (`fusion_rules.lower_index`)."""
    if op._schema.name not in _WRITING or len(args) < 3:
        return
    self, indices, values = args[:3]
    for d, index in enumerate(indices):
        if index is None:
            continue
        if index.dtype is torch.bool:
            tail = self.ndim - d - index.ndim
            rows = values.shape[-tail - 1] if values.ndim > tail >= 0 else 1
            if 1 < rows <= index.numel():
                # The first of the indices comes after `self`.
                actors[1] = (torch.arange(index.numel(), device=SEEN_AS) < rows).view(index.shape)
        return  # several masks, or one beside numbers, are not lowered


def is_beyond(op: OpOverload, tensors: list[torch.Tensor], inferred: Inferred) -> bool:
    """Whether a call is not rehearsed because it is too large, though its dtypes or strides ask for it."""
    return not _is_usual(op, tensors) and _elements(tensors, inferred) > _most(op, tensors)


def _most(op: OpOverload, tensors: list[torch.Tensor]) -> int:
    """Up to how many elements a call is rehearsed."""
    if _mixes(tensors):
        return HUGE
    return SMALL if _is_usual(op, tensors) else LARGE


def _mixes(tensors: list[torch.Tensor]) -> bool:
    """Whether there are floats of several dtypes, of whose results shape inference may say what is not so."""
    return len({t.dtype for t in tensors if t.is_floating_point()}) > 1


def _is_usual(op: OpOverload, tensors: list[torch.Tensor]) -> bool:
    if {t.dtype for t in tensors} not in _USUAL:
        return False
    return op._schema.name not in _OTHER_STRIDES or all(t.is_contiguous() for t in tensors)


def _elements(tensors: list[torch.Tensor], inferred: Inferred) -> int:
    return sum(map(_taken, tensors)) + sum(s.numel for s in inferred.fresh)


def _taken(t: torch.Tensor) -> int:
    """The elements that a rehearsal goes through for a tensor: those between the ones of a column as well."""
    return max(t.numel(), _extent(t))


def _extent(t: torch.Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def _zeros(t: torch.Tensor) -> torch.Tensor:
    return _filled(t, torch.zeros)


def _filled(t: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    flat = make(_extent(t), dtype=t.dtype, device=SEEN_AS).as_strided(t.shape, t.stride())
    flat = flat.conj() if t.is_conj() else flat
    return flat._neg_view() if t.is_neg() else flat
