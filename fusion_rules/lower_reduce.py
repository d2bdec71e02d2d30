"""Reductions: sums, extrema and where they are, truth, moments, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from .axes import (
    at_least_1d,
    average,
    axes_of,
    axis_of,
    count,
    keep_axes,
    moments,
    peak,
    quotient,
    reduced,
    running,
    sum_over,
    total,
    upcast,
)
from .elementwise import convert, isnan, kind, need, where
from .lowering import Context, as_range
from .precision import accumulator
from .rule import OpClass, rule
from .spec import JAX_DTYPE

Dims = int | Sequence[int] | None


def _shaped(cx: Context, x: Any, i: int = 0) -> Any:
    return lax.reshape(x, cx.out[i].shape)


# --- sums and products


def _summands(cx: Context, x: Any, dtype: Any) -> Any:
    # torch converts to the result's dtype first, then sums; half types are summed in float32.
    if dtype is not None or kind(x) in "bui":
        x = convert(x, cx.out[0].dtype)
    return upcast(x)


@rule(["sum.default", "sum.dim_IntList"], OpClass.REDUCTION)
def sum_(cx: Context, self: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = _summands(cx, self, dtype)
    reduce = lax.reduce_or if kind(x) == "b" else sum_over
    return _shaped(cx, reduce(x, axes_of(dim, self.ndim)))


@rule("nansum.default", OpClass.REDUCTION)
def nansum(cx: Context, self: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = _summands(cx, self, dtype)
    return _shaped(cx, sum_over(where(isnan(x), 0, x), axes_of(dim, self.ndim)))


@rule(["mean.default", "mean.dim"], OpClass.REDUCTION)
def mean(cx: Context, self: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _shaped(cx, average(_summands(cx, self, dtype), axes_of(dim, self.ndim)))


@rule(["prod.default", "prod.dim_int"], OpClass.REDUCTION)
def prod(cx: Context, self: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = _summands(cx, self, dtype)
    reduce = lax.reduce_and if kind(x) == "b" else lax.reduce_prod
    return _shaped(cx, reduce(x, axes_of(dim, self.ndim)))


@rule(["count_nonzero.default", "count_nonzero.dim_IntList"], OpClass.REDUCTION)
def count_nonzero(cx: Context, self: Any, dim: Dims = None) -> Any:
    return _shaped(cx, lax.reduce_sum((self != 0).astype(np.int64), axes_of(dim, self.ndim)))


@rule("hash_tensor.default", OpClass.REDUCTION)
def hash_tensor(cx: Context, self: Any, dim: Dims = None, *, keepdim: bool = False, mode: int = 0) -> Any:
    need(mode == 0 and kind(self) != "c", "only the xor of real numbers")
    wide = self.astype(np.float64 if kind(self) == "f" else np.int64)
    return _shaped(cx, lax.reduce_xor(lax.bitcast_convert_type(wide, np.uint64), axes_of(dim, self.ndim)))


@rule("trace.default", OpClass.REDUCTION)
def trace(cx: Context, self: Any) -> Any:
    rows, columns = self.shape
    n = min(rows, columns)
    # One strided slice of the flat matrix, so that XLA reads the diagonal alone.
    stop = (n - 1) * (columns + 1) + 1 if n else 0
    diagonal = lax.slice(lax.reshape(self, (rows * columns,)), (0,), (stop,), (columns + 1,))
    return lax.reduce_sum(_summands(cx, diagonal, None), (0,))


@rule("logsumexp.default", OpClass.REDUCTION)
def logsumexp(cx: Context, self: Any, dim: Dims, keepdim: bool = False) -> Any:
    axes = axes_of(dim, self.ndim)
    x = upcast(self.astype(JAX_DTYPE[cx.out[0].dtype]) if kind(self) in "bui" else self)
    # The shift has to be real; the largest real part bounds every modulus.
    top = peak(x.real, axes)
    top = where(abs(top) == np.inf, 0, top)
    return _shaped(cx, lax.log(total(lax.exp(x - top), axes)) + top)


# --- extrema


def extreme(x: Any, axes: tuple[int, ...], largest: bool) -> Any:
    """Maximum or minimum along axes (removed); NaN if there is one."""
    if kind(x) == "b":
        return lax.reduce_or(x, axes) if largest else lax.reduce_and(x, axes)
    return reduced(lax.reduce_max if largest else lax.reduce_min, x, axes)


def first_extreme(x: Any, axis: int, largest: bool) -> tuple[Any, Any]:
    """Maximum or minimum along one axis (removed), and the first position of it, or of the first NaN.

    Two plain reductions: XLA's own arg-reduction works on pairs and is not vectorised (10 to 20 times slower on CPU).
    """
    best = extreme(x, (axis,), largest)
    hit = x == keep_axes(best, (axis,))
    if kind(x) == "f":
        # If the best is NaN nothing equals it, and only the NaNs are left.
        hit = hit | isnan(x)
    n = x.shape[axis]
    # XLA:CPU vectorises reductions of floats alone; up to 2**24 a position is an exact float32.
    index = lax.broadcasted_iota(np.float32 if n <= 2**24 else np.int64, x.shape, axis)
    return best, reduced(lax.reduce_min, where(hit, index, n), (axis,)).astype(np.int64)


def _enter_extrema(name: str, largest: bool) -> None:
    @rule([f"a{name}.default", f"{name}.default"], OpClass.REDUCTION)
    def amax(cx: Context, self: Any, dim: Dims = None, keepdim: bool = False) -> Any:
        return _shaped(cx, extreme(self, axes_of(dim, self.ndim), largest))

    @rule(f"{name}.dim", OpClass.REDUCTION)
    def max_dim(cx: Context, self: Any, dim: int, keepdim: bool = False) -> Any:
        best, index = first_extreme(at_least_1d(self), axis_of(dim, self.ndim), largest)
        return _shaped(cx, best), _shaped(cx, index, 1)

    @rule(f"arg{name}.default", OpClass.REDUCTION)
    def argmax(cx: Context, self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        x = lax.reshape(self, (self.size,)) if dim is None else at_least_1d(self)
        return _shaped(cx, first_extreme(x, axis_of(dim or 0, x.ndim), largest)[1])


_enter_extrema("max", True)
_enter_extrema("min", False)


@rule("aminmax.default", OpClass.REDUCTION)
def aminmax(cx: Context, self: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    axes = axes_of(dim, self.ndim)
    return _shaped(cx, extreme(self, axes, False)), _shaped(cx, extreme(self, axes, True), 1)


# --- truth. The result is bool, but uint8 for uint8: the caller converts.


@rule(["any.default", "any.dim", "any.dims"], OpClass.REDUCTION)
def any_(cx: Context, self: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    # An explicit empty list reduces nothing in `any.dims`; None reduces all.
    axes = () if isinstance(dim, (list, tuple)) and not dim else axes_of(dim, self.ndim)
    return _shaped(cx, lax.reduce_or(self if kind(self) == "b" else self != 0, axes))


@rule(["all.default", "all.dim", "all.dims"], OpClass.REDUCTION)
def all_(cx: Context, self: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    axes = () if isinstance(dim, (list, tuple)) and not dim else axes_of(dim, self.ndim)
    return _shaped(cx, lax.reduce_and(self if kind(self) == "b" else self != 0, axes))


# --- moments


def _variance(x: Any, dim: Dims, correction: float | None) -> tuple[Any, Any]:
    """Variance and mean, axes kept. A complex number's variance is that of its two parts together."""
    axes = axes_of(dim, x.ndim)
    x = upcast(x)
    mean = running(average(x, axes))
    if x.size:
        # Counted from the first element, the variance of a constant is 0 and not rounding error.
        x = x - lax.slice(x, [0] * x.ndim, [1 if a in axes else n for a, n in enumerate(x.shape)])
    _, centred, squares = moments(x, axes)
    if kind(x) == "c":
        squares = total(centred.real * centred.real + centred.imag * centred.imag, axes)
    n = max(0, count(x, axes) - (1 if correction is None else correction))
    return quotient(squares, n), mean


def _enter_moments(name: str, finish: Callable[[Any], Any]) -> None:
    @rule(f"{name}.correction", OpClass.REDUCTION, keep=["correction"])
    def var(cx: Context, self: Any, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
        return _shaped(cx, finish(_variance(self, dim, correction)[0]))

    @rule(f"{name}_mean.correction", OpClass.REDUCTION, keep=["correction"])
    def var_mean(
        cx: Context, self: Any, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        variance, mean = _variance(self, dim, correction)
        return _shaped(cx, finish(variance)), _shaped(cx, mean, 1)


_enter_moments("var", lambda v: v)
_enter_moments("std", lax.sqrt)


# --- norms


def norm_along(x: Any, p: float, axes: tuple[int, ...]) -> Any:
    """The vector p-norm along axes (kept), real, in the accumulation dtype."""
    x = upcast(x)
    real = x.real.dtype
    if count(x, axes) == 1:
        # As ATen does: squaring a single tiny number would lose it.
        return lax.abs(x) if p else (x != 0).astype(real)
    if p == 0:
        return total((x != 0).astype(real), axes)
    if p == 2:
        squares = x.real * x.real + x.imag * x.imag if kind(x) == "c" else x * x
        return lax.sqrt(total(squares, axes))
    x = lax.abs(x)
    if p == 1:
        return total(x, axes)
    if math.isinf(p):
        return keep_axes(extreme(x, axes, p > 0), axes)
    return total(power(x, p), axes) ** np.asarray(1.0 / p, real)


def power(x: Any, p: float) -> Any:
    """`x ** p` for a number `p`; whole exponents are multiplied out."""
    return lax.integer_pow(x, int(p)) if p == int(p) and abs(p) <= 16 else x ** np.asarray(p, x.dtype)


@rule("linalg_vector_norm.default", OpClass.REDUCTION, keep=["ord"])
def vector_norm(
    cx: Context, self: Any, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x = self if dtype is None else convert(self, dtype)
    return _shaped(cx, norm_along(x, ord, axes_of(dim, self.ndim)))


@rule(
    ["norm.Scalar", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"],
    OpClass.REDUCTION,
    keep=["p"],
)
def norm(
    cx: Context, self: Any, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x = self if dtype is None else convert(self, dtype)
    return _shaped(cx, norm_along(x, 2 if p is None else p, axes_of(dim, self.ndim)))


@rule("_foreach_norm.Scalar", OpClass.REDUCTION, keep=["ord"])
def foreach_norm(cx: Context, self: list[Any], ord: float = 2, dtype: Any = None) -> Any:
    chosen = self if dtype is None else [convert(x, dtype) for x in self]
    return [_shaped(cx, norm_along(x, ord, axes_of(None, x.ndim)), i) for i, x in enumerate(chosen)]


@rule("dist.default", OpClass.REDUCTION, keep=["p"])
def dist(cx: Context, self: Any, other: Any, p: float = 2) -> Any:
    dtype = JAX_DTYPE[cx.out[0].dtype]
    difference = upcast(self) - upcast(other)
    if kind(difference) != "c":
        difference = difference.astype(accumulator(dtype))
    return _shaped(cx, norm_along(difference, p, axes_of(None, difference.ndim)))


@rule("renorm.default", OpClass.REDUCTION, keep=["p"])
def renorm(cx: Context, self: Any, p: float, dim: int, maxnorm: Any) -> Any:
    axis = axis_of(dim, self.ndim)
    x = upcast(self)
    norms = norm_along(x, p, tuple(a for a in range(x.ndim) if a != axis))
    limit = np.asarray(maxnorm, norms.dtype) if isinstance(maxnorm, (int, float)) else maxnorm.astype(norms.dtype)
    # ATen's guard against a division by zero is part of the result.
    factor = where(norms > limit, limit / (norms + np.asarray(1e-7, norms.dtype)), 1)
    return x * factor.astype(x.dtype)


@rule("histc.default", OpClass.REDUCTION, keep=["min", "max"], may_raise=True)
def histc(cx: Context, self: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    need(kind(self) == "f" and self.dtype.itemsize >= 4, "histc counts in its own dtype")
    x = lax.reshape(self, (self.size,))
    if min == max:
        low, high = (np.asarray(min, x.dtype),) * 2
        if x.size:
            low, high = extreme(x, (0,), False), extreme(x, (0,), True)
            broken = ~(lax.is_finite(low) & lax.is_finite(high))
            # ATen looks for them from the largest number down and from the lowest up, and passes over infinities.
            ends = lax.min(low, np.finfo(x.dtype).max), lax.max(high, np.finfo(x.dtype).min)
            cx.check(broken, "RuntimeError", "torch.histc: range of {range} is not finite", as_range(*ends))
        low, high = where(low == high, low - 1, low), where(low == high, high + 1, high)
    else:
        low, high = np.asarray(min, x.dtype), np.asarray(max, x.dtype)
    place = ((x - low) * np.asarray(bins, x.dtype) / (high - low)).astype(np.int32)
    inside = (x >= low) & (x <= high)
    place = where(inside, lax.min(place, np.asarray(bins - 1, np.int32)), bins)
    counts = lax.full((bins + 1,), 0, np.int64).at[place].add(1, mode="promise_in_bounds")
    return counts[:bins].astype(x.dtype)
