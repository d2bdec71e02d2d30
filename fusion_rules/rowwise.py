"""Rowwise: how JAX's primitives are computed for a block of rows alone, where each row depends on no other.

A value is *by rows* if its first axes count rows: [32, 512, 1024] has 16384 rows of 1024, and so has [16384, 1024]. A
row of the table gives, for one equation with operands by rows, the parameters with which the primitive computes the
block of its results; or says that it mixes rows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """What counts rows: axes of these sizes, or of products of neighbours. A block is `block` of them, a divisor of
    the last size.
    """

    sizes: Shape
    block: int

    @property
    def count(self) -> int:
        """How many rows there are."""
        return math.prod(self.sizes)

    @property
    def turns(self) -> int:
        """How many blocks there are."""
        return self.count // self.block

    def axes(self, shape: Shape) -> int:
        """How many of the first axes count rows; 0 if none do."""
        ends = {1, *itertools.accumulate(self.sizes, operator.mul)}
        for axes, end in enumerate(itertools.accumulate(shape, operator.mul), 1):
            if end == self.count:
                return axes
            if end not in ends:
                break
        return 0

    def of_block(self, shape: Shape) -> Shape:
        """The shape of a block of a value by rows."""
        axes = self.axes(shape)
        return (*(1 for _ in shape[: axes - 1]), self.block, *shape[axes:])


Params = dict[str, Any]
Given = Callable[[Rows, Any, int], Params | None]  # an equation's parameters for a block; None if it mixes rows
# (the last argument: how many axes of its result, and of operands by rows, count rows)


def _same(rows: Rows, eqn: Any, axes: int) -> Params | None:
    return dict(eqn.params)


def _axes_behind(name: str) -> Given:
    def params(rows: Rows, eqn: Any, axes: int) -> Params | None:
        found = eqn.params[name]
        return dict(eqn.params) if min(found if isinstance(found, tuple) else (found,), default=axes) >= axes else None

    return params


def _resized(name: str) -> Given:
    def params(rows: Rows, eqn: Any, axes: int) -> Params | None:
        # A size that is not known before it runs would be one more operand.
        return {**eqn.params, name: rows.of_block(eqn.params[name])} if len(eqn.invars) < 2 else None

    return params


def _iota(rows: Rows, eqn: Any, axes: int) -> Params | None:
    return None if eqn.params["dimension"] < axes else _resized("shape")(rows, eqn, axes)


def _reshape(rows: Rows, eqn: Any, axes: int) -> Params | None:
    return None if eqn.params["dimensions"] is not None else _resized("new_sizes")(rows, eqn, axes)


def _transpose(rows: Rows, eqn: Any, axes: int) -> Params | None:
    return dict(eqn.params) if tuple(eqn.params["permutation"][:axes]) == tuple(range(axes)) else None


def _slice(rows: Rows, eqn: Any, axes: int) -> Params | None:
    shape, limits = eqn.invars[0].aval.shape, eqn.params["limit_indices"]
    cut = any(eqn.params["start_indices"][:axes]) or limits[:axes] != shape[:axes]
    if cut or any(s != 1 for s in (eqn.params["strides"] or ())[:axes]):
        return None
    return {**eqn.params, "limit_indices": (*rows.of_block(shape)[:axes], *limits[axes:])}


def _pad(rows: Rows, eqn: Any, axes: int) -> Params | None:
    return None if any(any(axis) for axis in eqn.params["padding_config"][:axes]) else dict(eqn.params)


_ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div elementwise eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not optimization_barrier
    or population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})

GIVEN: dict[str, Given] = {
    **dict.fromkeys(ELEMENTWISE, _same),
    **dict.fromkeys(REDUCTIONS | {"reduce_prod", "argmax", "argmin"}, _axes_behind("axes")),
    **dict.fromkeys(("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"), _axes_behind("axis")),
    "rev": _axes_behind("dimensions"),
    "squeeze": _axes_behind("dimensions"),
    "concatenate": _axes_behind("dimension"),
    "sort": _axes_behind("dimension"),
    "broadcast_in_dim": _resized("shape"),
    "iota": _iota,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "pad": _pad,
}


MAKERS = frozenset({"broadcast_in_dim", "iota"})  # cheaper to compute for each block than to read


def row_axes(eqn: Any, shape: Shape, axes: int) -> dict[int, int]:
    """Which axes of an operand of this shape count rows, and which axis of the result each is; `axes` of its do."""
    spread = eqn.primitive.name == "broadcast_in_dim"
    goes_to = eqn.params["broadcast_dimensions"] if spread else range(len(shape))
    return {a: r for a, r in enumerate(goes_to) if r < axes and shape[a] != 1}


def _counting(shape: Shape, axes: int) -> list[int]:
    return [a for a in range(axes) if shape[a] != 1]


def _straight(axes: list[int], of_result: list[int]) -> dict[int, int] | None:
    """Each of the axes that count an operand's rows goes to the one of the result that is in its place."""
    return dict(zip(axes, of_result, strict=True)) if len(axes) == len(of_result) else None


def params_of_block(rows: Rows, eqn: Any, result: Shape, by_rows: list[Shape]) -> Params | None:
    """The parameters with which an equation computes a block of rows; None if it mixes rows, or nothing is known.

    `result` is the shape of what it computes; `by_rows` are those of its operands that are by rows.
    """
    given = GIVEN.get(eqn.primitive.name)
    axes = rows.axes(result)
    if given is None or not axes:
        return None
    if eqn.primitive.name != "reshape":
        for shape in by_rows:
            if row_axes(eqn, shape, axes) != _straight(_counting(shape, rows.axes(shape)), _counting(result, axes)):
                return None
    return given(rows, eqn, axes)
