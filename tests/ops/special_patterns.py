"""Patterns: special values in place of the numbers of a sample.

A *pattern* fills every float tensor of a sample, or every one of its dtype if that is one of whole numbers. Shapes
stay, so all patterns of a sample run what was compiled for the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_map

from .outcomes import is_float


def cycle(dtype: torch.dtype, large: float = 0.88) -> list[float]:
    """The numbers at which kernels have special cases, in a row."""
    info = torch.finfo(dtype)
    inf, nan = float("inf"), float("nan")
    return [0.0, -0.0, inf, -inf, nan, 1.0, -1.0, 1.7 * info.tiny, large * info.max, 0.5]


LESS = 1e-3  # a number so large that a sum of a few hundred is none too large yet, in whatever order


Fill = Callable[[torch.Tensor, int], torch.Tensor]  # of real floats, and the how manieth tensor of the sample it is


def _constant(value: Callable[[torch.finfo], float]) -> Fill:
    return lambda t, k: torch.full_like(t, value(torch.finfo(t.dtype)))


def _turned(start: int, step: int, large: float = LESS) -> Fill:
    """The cycle from its `start`; the next tensor of the sample begins `step` numbers later."""

    def fill(t: torch.Tensor, k: int) -> torch.Tensor:
        row = torch.tensor(cycle(t.dtype, large), dtype=t.dtype)
        return row[(torch.arange(t.numel()) + start + step * k) % len(row)].reshape(t.shape)

    return fill


def _pairs(t: torch.Tensor, k: int) -> torch.Tensor:
    # Each number of one tensor meets others of the next.
    row = torch.tensor(cycle(t.dtype, LESS), dtype=t.dtype)
    return row[(torch.arange(t.numel()) * (1 + 2 * k) + torch.arange(t.numel()) // 10 + k) % len(row)].reshape(t.shape)


def _one(value: float) -> Fill:
    """One number of a tensor is special, the others are as they were."""

    def fill(t: torch.Tensor, k: int) -> torch.Tensor:
        return t.masked_fill(torch.arange(t.numel()).reshape(t.shape) == (t.numel() + k) // 2, value)

    return fill


def _rows(t: torch.Tensor, k: int) -> torch.Tensor:
    return t[(slice(0, 1),) * (t.ndim - 1)].expand_as(t).contiguous() if t.numel() else t


INF, NAN = float("inf"), float("nan")
PATTERNS: dict[str, Fill] = {
    "zeros": _constant(lambda info: 0.0),
    "negative zeros": _constant(lambda info: -0.0),
    "ones": _constant(lambda info: 1.0),
    "halves": _constant(lambda info: 0.5),
    "negative": _constant(lambda info: -1.0),
    "inf": _constant(lambda info: INF),
    "-inf": _constant(lambda info: -INF),
    "nan": _constant(lambda info: NAN),
    "largest": _constant(lambda info: info.max),
    "lowest": _constant(lambda info: info.min),
    "smallest": _constant(lambda info: info.tiny),
    "equal rows": _rows,
    "ties": lambda t, k: (t / 2).clamp(max(-1e6, torch.finfo(t.dtype).min), min(1e6, torch.finfo(t.dtype).max)).round(),
    "one nan": _one(NAN),
    "one inf": _one(INF),
    "one -inf": _one(-INF),
    "cycle": _turned(0, 0, 0.88),
    "cycles": _turned(0, 3),
    "pairs": _pairs,
    "gradients": lambda t, k: t,  # the incoming ones are special, the inputs are op_db's
    "one element": lambda t, k: t[(slice(0, 1),) * t.ndim],
    "no elements": lambda t, k: t[(slice(0, 0),) * t.ndim],
}


def _whole(value: Callable[[torch.iinfo], int]) -> Fill:
    def fill(t: torch.Tensor, k: int) -> torch.Tensor:
        if t.dtype is torch.bool:
            return torch.full_like(t, bool(value(torch.iinfo(torch.uint8))))
        return torch.full_like(t, value(torch.iinfo(t.dtype)))

    return fill


def _wrapping(t: torch.Tensor, k: int) -> torch.Tensor:
    """Whole numbers of which sums and products are too large for the dtype."""
    if t.dtype is torch.bool:
        return (torch.arange(t.numel()) + k).reshape(t.shape) % 2 == 0
    info = torch.iinfo(t.dtype)
    row = torch.tensor([0, 1, info.max, info.min, 2, info.max // 2 + 1, info.max - 1, 3], dtype=t.dtype)
    return row[(torch.arange(t.numel()) + 3 * k) % len(row)].reshape(t.shape)


# What fills tensors of whole numbers.
WHOLE: dict[str, Fill] = {
    "zeros": _whole(lambda info: 0),
    "ones": _whole(lambda info: 1),
    "largest": _whole(lambda info: info.max),
    "lowest": _whole(lambda info: info.min),
    "equal rows": _rows,
    "wrapping": _wrapping,
    "one element": PATTERNS["one element"],
    "no elements": PATTERNS["no elements"],
}
WITH_SEEDS = frozenset({"gradients", "pairs"})  # patterns that fill the incoming gradients as well


def patterns_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The patterns of samples of a dtype."""
    return tuple(PATTERNS if dtype.is_floating_point or dtype.is_complex else WHOLE)


def filled(sample: SampleInput, pattern: str, dtype: torch.dtype = torch.float32) -> SampleInput:
    """The sample with the pattern in its float tensors, or in those of the dtype if that is one of whole numbers. They
    keep their strides where they keep their shape."""
    count = 0
    whole = not (dtype.is_floating_point or dtype.is_complex)

    def fill(x: Any) -> Any:
        nonlocal count
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested or x.is_quantized:
            return x
        sized = pattern in ("one element", "no elements")
        if not (is_float(x) or sized or (whole and x.dtype is dtype)):
            return x
        with torch.no_grad():
            values = _values(x.detach(), pattern, count)
            new = x.detach().clone().copy_(values) if values.shape == x.shape else values.clone()
        count += 1
        return new.requires_grad_(x.requires_grad)

    other = copy.copy(sample)
    other.input, other.args, other.kwargs = tree_map(fill, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    return other


def _values(x: torch.Tensor, pattern: str, count: int) -> torch.Tensor:
    if not is_float(x):
        return WHOLE.get(pattern, PATTERNS.get(pattern, _rows))(x, count)
    if pattern not in PATTERNS:
        return x
    if x.is_complex():
        real, imag = x.resolve_conj().real, x.resolve_conj().imag
        return torch.complex(PATTERNS[pattern](real, count), PATTERNS[pattern](imag, count + 1))
    return PATTERNS[pattern](x, count)


def seeds(pattern: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What comes in from behind, for a result."""
    if pattern not in WITH_SEEDS:
        return torch.ones_like
    fill = _turned(4, 0)

    def seed(t: torch.Tensor) -> torch.Tensor:
        if t.is_complex():
            return torch.complex(fill(t.real, 0), fill(t.imag, 0))
        return torch.empty_like(t).copy_(fill(t.detach().clone(), 0)) if is_float(t) else torch.ones_like(t)

    return seed
