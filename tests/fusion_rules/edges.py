"""Compare a lowering with eager where pointwise functions have their corners: zeros with signs, infinities, NaN."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch._ops import OpOverload

from .errors import Outcome, judged_later

FLOATS = [torch.float32, torch.bfloat16, torch.float64]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]
CORNERS = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 1.5, -2.5, 6.0, -6.0,
           20.5, -20.5, 1e-3, -1e-3, 100.0, -100.0]
WHOLE = [0, 1, -1, 2, -2, 3, -3, 7, -7, 8, 31, 32, 33, 63, 64, 65, 127, -127, 100]
RTOL = {torch.float32: 4e-6, torch.float64: 1e-12, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}


def corners(dtype: torch.dtype) -> list[Any]:
    """The values of a dtype at which functions change their minds."""
    if dtype.is_floating_point:
        return CORNERS
    if dtype == torch.bool:
        return [False, True]
    info = torch.iinfo(dtype)
    # Eager itself dies on `smallest % -1`.
    return [v for v in WHOLE if info.min <= v <= info.max] + [info.min + 1 if info.min else 0, info.max]


def grid(dtype: torch.dtype, arity: int = 1) -> list[torch.Tensor]:
    """All tuples of corners, one tensor for each place; long enough for eager's vectorised loops."""
    values = corners(dtype)
    columns = zip(*itertools.product(values, repeat=arity), strict=True)
    return [torch.tensor(c, dtype=dtype).repeat(max(1, 128 // len(c))) for c in columns]


def assert_agrees(op: OpOverload, *args: Any, rtol: float | None = None, atol: float = 0.0, signs: bool = True,
                  **kwargs: Any) -> None:
    """Values as close as `rtol` and `atol` ask, the same infinities and NaNs, and zeros of the same sign."""
    def compare(got: Outcome, wanted: list[torch.Tensor]) -> None:
        assert isinstance(got, list), f"a check fails: {got}"
        for a, b in zip(got, wanted, strict=True):
            _assert_agree(a, b, args, rtol, atol, signs)

    judged_later(op, op(*args, **kwargs), args, kwargs, compare)


def _assert_agree(
    a: torch.Tensor, b: torch.Tensor, args: Any, rtol: float | None, atol: float, signs: bool
) -> None:
    a, b = (torch.view_as_real(a), torch.view_as_real(b)) if b.is_complex() else (a, b)
    assert a.dtype == b.dtype and a.shape == b.shape
    if not b.is_floating_point():
        assert torch.equal(a, b), _shown(a != b, args, a, b)
        return
    bad = ~torch.isclose(a.double(), b.double(), rtol=RTOL[b.dtype] if rtol is None else rtol, atol=atol,
                         equal_nan=True)
    if signs:
        bad |= (a == 0) & (b == 0) & (a.signbit() != b.signbit())
    assert not bad.any(), _shown(bad, args, a, b)


def _shown(bad: torch.Tensor, args: Any, got: torch.Tensor, want: torch.Tensor) -> str:
    where = tuple(bad.nonzero()[0].tolist())
    at = [x[where].item() if isinstance(x, torch.Tensor) and x.shape == bad.shape else x for x in args]
    return f"at {at}: eager {want[where].item()}, lowered {got[where].item()}; {int(bad.sum())} differ"
