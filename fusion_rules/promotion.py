"""Type promotion: in which dtype an elementwise op computes.

The rule is that of ATen's `result_type`: arrays with dimensions decide over those without, these over Python numbers,
and a lower one has a say only by its category (bool, integer, floating, complex). `torch._prims_common` has the same
rule in Python, and imports SymPy to ask whether an argument is one of its expressions: a third of a second.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promote
from torch._prims_common import get_computation_dtype

DIMENSIONED, SCALAR, NUMBER = range(3)  # what an operand is: an array with dimensions, one without, a Python number
Promoted = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]  # what those of each sort come to together


def number_dtype(kind: type) -> torch.dtype:
    """The dtype that a Python number of this type stands for."""
    default = torch.get_default_dtype()
    if issubclass(kind, bool):
        return torch.bool
    return torch.int64 if issubclass(kind, int) else default if issubclass(kind, float) else default.to_complex()


def _higher(one: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
    return other if one is None else one if other is None else torch.promote_types(one, other)


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1 if dtype is not torch.bool else 0


def _over(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """The dtype of `higher`, unless `lower` is of a category above."""
    if higher is None or lower is None or _category(lower) <= _category(higher):
        return lower if higher is None else higher
    return higher.to_complex() if higher.is_floating_point else torch.promote_types(higher, lower)


def promoted(operands: Iterable[tuple[torch.dtype, int]]) -> Promoted:
    """What operands come to, sort by sort, given as (dtype, sort); None where there are none of a sort."""
    found: list[torch.dtype | None] = [None, None, None]
    for dtype, sort in operands:
        found[sort] = _higher(found[sort], dtype)
    return found[0], found[1], found[2]


@functools.lru_cache(4096)
def computation_dtype(of: Promoted, kind: Promote, default: torch.dtype) -> torch.dtype:
    """The dtype in which an op with these operands computes; `default` is torch's default dtype."""
    dimensioned, scalars, numbers = of
    dtype = _over(dimensioned, _over(scalars, numbers)) or torch.bool
    if kind is Promote.NO_OPMATH:
        return dtype
    if kind is Promote.INT_TO_FLOAT and _category(dtype) < 2:
        dtype = default
    if kind is Promote.BOOL_TO_LONG and dtype is torch.bool:
        dtype = torch.int64
    return get_computation_dtype(dtype)
