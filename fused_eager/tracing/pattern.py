"""Patterns: the structure of a call's arguments as something that the next call can be compared with, fast.

Equal structure means the same memo key as `calls.take` makes, without making one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from fused_eager.fusion_rules.geometry import Geometry

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
INT64 = range(-(2**63), 2**63)  # whole numbers outside stay part of the structure

# How an argument is compared, by the first element of its row in a pattern.
TENSOR, NUMBER, CONSTANT, EXACT, SEQUENCE = range(5)
Row = tuple[Any, ...]


def freeze(value: Any) -> Hashable:
    """A structural argument as a key. Floats by their bits: 0.0 and -0.0, 1 and 1.0 and True are different calls."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind is bool:
        return kind, value
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    return value


def pattern(values: Any, views: Iterator[Geometry], hoist: bool) -> tuple[Row, ...]:
    """What the arguments `values` have to look like to be the same structure. `views` gives those of its tensors."""
    rows: list[Row] = []
    for a in values:
        kind = type(a)
        if isinstance(a, Tensor):
            g = next(views)
            rows.append((TENSOR, torch.Size(g.size), g.stride, g.dtype, g.neg, g.conj))
        elif hoist and (kind is float or (kind is int and a in INT64)):
            rows.append((NUMBER, kind))
        elif kind in (list, tuple):
            if any(isinstance(x, (Tensor, float, complex, list, tuple)) for x in a) or (hoist and a):
                rows.append((SEQUENCE, len(a), pattern(a, views, hoist)))
            else:
                rows.append((CONSTANT, kind, a))
        elif kind is float or kind is complex:
            rows.append((EXACT, kind, freeze(a)))
        else:
            rows.append((CONSTANT, kind, a))
    return tuple(rows)


def matches(rows: tuple[Row, ...], values: Any, tensors: list[Tensor], scalars: list[Any]) -> bool:
    """Whether arguments have the structure of a pattern; takes out their tensors and hoisted numbers."""
    for row, a in zip(rows, values):  # noqa: B905 (lengths were compared)
        what = row[0]
        if what == TENSOR:
            kind = type(a)
            if kind is not Tensor and kind is not Parameter and not isinstance(a, Tensor):
                return False
            try:
                if a.shape != row[1] or a.stride() != row[2] or a.dtype is not row[3] or a.is_neg() is not row[4]:
                    return False
            except RuntimeError:  # a compressed sparse tensor has no strides, a nested one not even a shape
                return False
            if row[3].is_complex and a.is_conj() is not row[5]:
                return False
            tensors.append(a)
        elif what == NUMBER:
            if type(a) is not row[1] or (row[1] is int and a not in INT64):
                return False
            scalars.append(a)
        elif what == CONSTANT:
            if type(a) is not row[1] or a != row[2]:
                return False
        elif what == SEQUENCE:
            if type(a) not in (list, tuple) or len(a) != row[1] or not matches(row[2], a, tensors, scalars):
                return False
        elif type(a) is not row[1] or freeze(a) != row[2]:
            return False
    return True
