"""Reductions in steps, as XLA:CPU does them fast.

Up to 32 values XLA:CPU reduces in the loop that computes them; more of them it stores first. And along the last axis it
takes one value after another, where lanes beside each other are vectorised. So 32 values or fewer go first, into lanes
or rows, and what is left of them behind a barrier, because XLA makes one reduction of two. (One thread, 1M float32: a
sum 0.11 ms instead of 0.29, a sum of squares 0.15 instead of 0.53.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from .. import axes as axes_
from ..axes import Axes, count
from ..lowering import Context

BLOCK = 32  # values that are reduced where they are computed, at most
SMALL = 1 << 13  # elements: below, one loop more costs what it saves
WIDE = 256  # lanes: more of them leave the registers
# Bytes: below, an array that is read a second time comes out of a cache; above, a second pass costs more than it saves.
CACHED = 8 << 20


def largest_divisor(n: int, most: int) -> int:
    """Of `n`, up to `most`, and 1 at least: so many at a time leave nothing over."""
    return next(k for k in range(max(min(n, most), 1), 0, -1) if n % k == 0)


@axes_.reduced.on("cpu")
def reduced(reduce: Callable[[Any, Axes], Any], x: Any, axes: Axes) -> Any:
    """A reduction that may take its values in any order, in steps."""
    steps = _steps(x, axes)
    if steps is None:
        return reduce(x, axes)
    partial = lax.optimization_barrier(reduce(lax.reshape(x, steps.shape), (steps.first,)))
    if steps.lanes and count(partial, steps.rest) > BLOCK:
        partial = lax.optimization_barrier(reduce(partial, steps.rest))
        return reduce(partial, (partial.ndim - 1,))
    return reduce(partial, (*steps.rest, *steps.lanes))


@dataclass(frozen=True, slots=True)
class _Steps:
    """The shape in which to reduce, and along which axis first; along which ones then, and the lanes last, counted
    without the first."""

    shape: tuple[int, ...]
    first: int
    rest: Axes
    lanes: Axes = ()


def _steps(x: Any, axes: Axes) -> _Steps | None:
    """None where it cannot be done in steps, or is not worth it.

    A last axis that is long enough is cut alone: what counts rows should go on counting them.
    """
    if x.size < SMALL:
        return None
    kept, length = x.ndim, 1
    while kept and kept - 1 in axes and length < 2 * BLOCK:
        kept -= 1
        length *= x.shape[kept]
    if kept == x.ndim:
        return _of_rows(x, axes)
    cut = _lanes(length)
    if cut is None:
        return None
    at = kept + len(cut) - 2
    return _Steps((*x.shape[:kept], *cut), at, (*(a for a in axes if a < kept), *range(kept, at)), (at,))


def _lanes(length: int) -> tuple[int, ...] | None:
    """How an axis of this length is cut: into (parts,) values of a lane, lanes."""
    if length < 2 * BLOCK:
        return None
    values = largest_divisor(length, min(BLOCK, length // BLOCK))
    if values > 1 and length // values <= WIDE:
        return values, length // values
    values = _values(length, BLOCK)
    return (length // (values * BLOCK), values, BLOCK) if values else None


def _of_rows(x: Any, axes: Axes) -> _Steps | None:
    """Where the last axis stays. Large arrays are left to the loop over blocks of rows
    (`fused_eager.lowering.xla_cpu.row_blocks`)."""
    if not axes or x.size * x.dtype.itemsize >= CACHED:
        return None
    end = at = max(axes) + 1
    while at - 1 in axes:
        at -= 1
    length = math.prod(x.shape[at:end])
    values = _values(length)
    if not values:
        return None
    shape = (*x.shape[:at], length // values, values, *x.shape[end:])
    return _Steps(shape, at + 1, (*(a for a in axes if a < at), at))


def _values(length: int, each: int = 1) -> int:
    """How many values to take first, of parts of `each` times as many; 0 if an axis of this length cannot be cut. XLA
    leaves the reduction of the parts apart if there are more than 32."""
    return next((v for v in (32, 16, 8, 4) if length % (v * each) == 0 and length > v * each * BLOCK), 0)


# XLA:CPU adds up to 32 * 32 numbers along several axes one after another.
BLOCKED = BLOCK * BLOCK


def _added(x: Any, axes: Axes) -> Any:
    """The sum along axes; what XLA would add one after another (31x31 equal numbers: off by 9e-6) is added along one
    axis after the other, behind barriers, because it makes one reduction of two."""
    if len(axes) > 1 and BLOCK < count(x, axes) <= BLOCKED:
        last = max(axes)
        rows = lax.optimization_barrier(lax.reduce_sum(x, (last,)))
        return _added(rows, tuple(a for a in axes if a != last))
    return lax.reduce_sum(x, axes)


@axes_.summed.on("cpu")
def summed(x: Any, axes: Axes) -> Any:
    """The sum of floats, in steps."""
    return reduced(_added, x, axes)


@axes_.again.on("cpu")
def again(*values: Any) -> tuple[Any, ...]:
    """The same small arrays, in which XLA does not recognise the old ones.

    What two loops have in common, XLA:CPU stores in memory first. Where it is a subtraction from a large array,
    computing it twice is cheaper (layer norm backward at [16384, 1024]: 63 ms against 140). Called twice with the same
    values it gives the same arrays: for a third copy, take one of the second.
    """
    return tuple(lax.optimization_barrier(values))


@axes_.separated.on("cpu")
def separated(cx: Context, x: Any, *statistics: Any) -> tuple[Any, ...]:
    """Float statistics of rows of `x`, behind a cut between the loop that makes them and the loop that uses them.

    Left alone, XLA:CPU interleaves the two row by row in one kernel that is slower by a quarter unless `x` is so large
    that memory decides (softmax at [4096, 256]: 0.53 against 0.73 ms).
    """
    if x.size * x.dtype.itemsize > CACHED:
        return statistics
    words = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.optimization_barrier([lax.bitcast_convert_type(s, words) for s in statistics])
    return tuple(lax.bitcast_convert_type(b, x.dtype) for b in bits)
