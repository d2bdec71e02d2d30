"""Which axes a reduction runs over, and sums, means and variances along them in ATen's accumulation dtype.

On XLA:CPU sums are taken in steps (`xla_cpu.steps`), of parts, and so are as exact as ATen's cascade sum. Products with
ones, one-pass moments and YNNPACK's sums are slower, less exact or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from .elementwise import hidden
from .lowering import Context
from .platforms import variants
from .precision import accumulator

Axes = tuple[int, ...]


def count(x: Any, axes: Axes) -> int:
    """How many elements are reduced into one."""
    return math.prod(x.shape[a] for a in axes)


def axis_of(dim: int, ndim: int) -> int:
    """A dimension as a number from 0; a 0-d tensor has the one dimension 0."""
    return dim % max(ndim, 1)


def axes_of(dim: int | Sequence[int] | None, ndim: int) -> Axes:
    """Dimensions as axes of an array; None and the empty list mean all of them."""
    if ndim == 0:
        return ()
    if isinstance(dim, int):
        return (dim % ndim,)
    return tuple(d % ndim for d in dim) if dim else tuple(range(ndim))


def at_least_1d(x: Any) -> Any:
    """A 0-d array as one row of one element."""
    return x if x.ndim else lax.reshape(x, (1,))


def upcast(x: Any) -> Any:
    """Half types as float32, the rest as it is."""
    dtype = accumulator(x.dtype)
    return x if x.dtype == dtype else x.astype(dtype)


@variants
def reduced(reduce: Callable[[Any, Axes], Any], x: Any, axes: Axes) -> Any:
    """`reduce(x, axes)`, for a reduction that may take its values in any order."""
    return reduce(x, axes)


@variants
def summed(x: Any, axes: Axes) -> Any:
    """The sum of floats along axes, which go."""
    return lax.reduce_sum(x, axes)


def sum_over(x: Any, axes: Axes) -> Any:
    """The sum along axes, which go. It begins with 0: of one number that is -0 too, for which XLA takes the number."""
    if np.dtype(x.dtype).kind not in "fc":
        return lax.reduce_sum(x, axes)
    found = summed(x, axes)
    if count(x, axes) != 1 or np.dtype(x.dtype).kind == "c":
        return found
    return lax.select(found == 0, lax.full_like(found, 0), found)


def total(x: Any, axes: Axes) -> Any:
    """The sum along axes, which stay with size 1."""
    return keep_axes(sum_over(x, axes), axes)


def peak(x: Any, axes: Axes) -> Any:
    """The maximum along axes, which stay with size 1; NaN if there is one."""
    return keep_axes(reduced(lax.reduce_max, x, axes), axes)


def keep_axes(x: Any, axes: Axes) -> Any:
    """Put the axes that a reduction removed back with size 1."""
    return lax.expand_dims(x, sorted(axes))


def quotient(x: Any, n: Any) -> Any:
    """`x / n` for one number `n`, correctly rounded.

    XLA multiplies by the reciprocal of a divisor that it sees to be one number, and then 49 / 49 is less than 1. Hidden
    from it that is an array like any other.
    """
    n = np.asarray(n, x.dtype) if isinstance(n, (int, float)) else n.astype(x.dtype)
    return lax.div(x, hidden(lax.broadcast(n, x.shape), x))


@variants
def again(*values: Any) -> tuple[Any, ...]:
    """The same small arrays, for another loop over a large one: whether the two share what is computed of them is the
    compiler's choice."""
    return values


@variants
def separated(cx: Context, x: Any, *statistics: Any) -> tuple[Any, ...]:
    """Float statistics of rows of `x`, between the loop that makes them and the loop that uses them."""
    return statistics


def average(x: Any, axes: Axes) -> Any:
    """The mean along axes, which stay with size 1. The mean of nothing is NaN."""
    return quotient(total(x, axes), count(x, axes))


def centre(x: Any, axes: Axes) -> Any:
    """The mean along axes; where it is the first element but for what summing rounds, that element.

    So equal numbers are 0 exactly once they are centred, as with eager's running update (Welford 1962), and there is no
    rounding error for a division by a tiny deviation to magnify.
    """
    mean = average(x, axes)
    many = count(x, axes)
    if not many or np.dtype(x.dtype).kind != "f":
        return mean
    first = lax.slice(x, [0] * x.ndim, [1 if a in axes else n for a, n in enumerate(x.shape)])
    # Of the count as it stands in the trace: a count that is a symbol is a number there like any other.
    steps = lax.max(lax.sqrt(np.asarray(many, "float32")), np.float32(4))
    rounding = (steps * np.float32(np.finfo(x.dtype).eps)).astype(x.dtype)
    return lax.select(lax.abs(mean - first) <= rounding * lax.abs(first), first, mean)


def running(mean: Any) -> Any:
    """A mean as eager's running update leaves it, which infinities make NaN: it takes the difference of two of them.

    For results: what is centred by the mean as it is comes to the same, and in the loop over `x` a select costs a third
    of a layer norm's time.
    """
    return lax.select(lax.abs(mean) == np.inf, lax.full_like(mean, np.nan), mean) if mean.dtype.kind != "c" else mean


def moments(x: Any, axes: Axes) -> tuple[Any, Any, Any]:
    """Mean, `x - mean` and the sum of its squares: two passes, so that a large mean costs no digits."""
    mean = centre(x, axes)
    centred = x - mean
    return mean, centred, total(centred * centred, axes)


def identity(dtype: Any, largest: bool) -> np.ndarray:
    """The largest or smallest value of a dtype, infinities included: where a minimum or a maximum starts."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.asarray(largest)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.asarray(info.max if largest else info.min, dtype)
    return np.asarray(math.inf if largest else -math.inf, dtype)


def index_along(shape: tuple[int, ...], axis: int) -> Any:
    """The position of every element along one axis, int32 where that is enough."""
    return lax.broadcasted_iota(np.int32 if shape[axis] < 2**31 else np.int64, shape, axis)
