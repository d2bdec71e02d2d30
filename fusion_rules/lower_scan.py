"""Cumulative ops: running sums, products, extrema and log-sum-exps along one dimension.

The parallel form is for devices on which a step is a launch; on XLA:CPU a scan is a loop (`xla_cpu.scan`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from .axes import at_least_1d, axis_of, identity, index_along, upcast
from .elementwise import convert, isnan, kind, maximum, minimum, need, where
from .lowering import Context
from .platforms import variants
from .rule import OpClass, rule

Combine = Callable[[Any, Any], Any]

@variants
def accumulated(dtype: np.dtype) -> np.dtype:
    """The dtype in which running values of a dtype are kept."""
    return dtype


@variants
def scan(x: Any, axis: int, combine: Combine, start: Any) -> Any:
    """Running `combine` along an axis; `x` and `start` may be tuples of arrays, as `combine` takes and returns them.

    `start` is what precedes the first element, in the dtype in which a single operand is accumulated.
    """
    return lax.associative_scan(combine, x, axis=axis) if (x[0] if isinstance(x, tuple) else x).size else x


def _running(cx: Context, x: Any, dim: int, combine: Combine, start: float) -> Any:
    """A scan with one operand, rounded to the result's dtype as it goes."""
    x = upcast(at_least_1d(x))
    wide = accumulated(np.dtype(x.dtype))
    out = scan(x, axis_of(dim, x.ndim), combine, np.asarray(start, wide))
    return lax.reshape(out, cx.out[0].shape)


@rule("cumsum.default", OpClass.SCAN)
def cumsum(cx: Context, self: Any, dim: int, *, dtype: Any = None) -> Any:
    return _running(cx, convert(self, cx.out[0].dtype), dim, lax.add, 0)


@rule("cumprod.default", OpClass.SCAN)
def cumprod(cx: Context, self: Any, dim: int, *, dtype: Any = None) -> Any:
    return _running(cx, convert(self, cx.out[0].dtype), dim, lax.mul, 1)


def logaddexp(x: Any, y: Any) -> Any:
    """`log(exp(x) + exp(y))` of real floats; two equal infinities give that infinity."""
    low, high = minimum(x, y), maximum(x, y)
    # Equal infinities would give inf - inf.
    return where((low != high) | lax.is_finite(low), lax.log1p(lax.exp(low - high)) + high, x)


@rule("logcumsumexp.default", OpClass.SCAN)
def logcumsumexp(cx: Context, self: Any, dim: int) -> Any:
    need(kind(self) == "f", "the complex logarithm's branch depends on the order of the sum")
    return _running(cx, self, dim, logaddexp, -np.inf)


def _enter_running_extreme(name: str, largest: bool) -> None:
    @rule(f"{name}.default", OpClass.SCAN)
    def cummax(cx: Context, self: Any, dim: int) -> Any:
        x = at_least_1d(self)
        boolean = kind(x) == "b"
        x = x.astype(np.uint8) if boolean else x
        axis = axis_of(dim, x.ndim)
        if x.size == 0:
            return self, lax.full(self.shape, 0, np.int64)

        def later(left: Any, right: Any) -> Any:
            # Of equal values the last one counts, and once a NaN was seen only another NaN.
            wins = right[0] >= left[0] if largest else right[0] <= left[0]
            if kind(x) == "f":
                wins = isnan(right[0]) | (~isnan(left[0]) & wins)
            return lax.select(wins, right[0], left[0]), lax.select(wins, right[1], left[1])

        index = index_along(x.shape, axis)
        start = identity(x.dtype, not largest), np.asarray(0, index.dtype)
        values, places = scan((x, index), axis, later, start)
        values = values != 0 if boolean else values
        return lax.reshape(values, self.shape), lax.reshape(places.astype(np.int64), self.shape)


_enter_running_extreme("cummax", True)
_enter_running_extreme("cummin", False)
