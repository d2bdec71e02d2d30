"""Cumulative ops: running sums, products, extrema and log-sum-exps along one dimension.

On CPU a scan is a loop, as in ATen, with ATen's accumulation dtype: XLA compiles it to a plain machine loop (3 ns a
step) and float32 results equal eager's bit for bit. The parallel form is for devices on which a step is a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .axes import at_least_1d, axis_of, identity, index_along, upcast
from .elementwise import convert, isnan, kind, maximum, minimum, need, where
from .lowering import Context
from .rule import OpClass, rule

Combine = Callable[[Any, Any], Any]

# What `at::acc_type` says on CPU: running values of float32 are kept in float64.
CPU_ACCUMULATOR: dict[np.dtype, np.dtype] = {
    np.dtype(np.float32): np.dtype(np.float64),
    np.dtype(np.complex64): np.dtype(np.complex128),
}


def scan(cx: Context, x: Any, axis: int, combine: Combine, start: Any) -> Any:
    """Running `combine` along an axis; `x` and `start` may be tuples of arrays, as `combine` takes and returns them.

    `start` is what precedes the first element, in the dtype in which a single operand is accumulated on CPU.
    """
    first = x[0] if isinstance(x, tuple) else x
    if first.size == 0:
        return x
    if cx.out[0].device.type != "cpu":
        return lax.associative_scan(combine, x, axis=axis)

    def step(carry: Any, value: Any) -> tuple[Any, Any]:
        carry = combine(carry, value)
        return carry, carry

    def wider(carry: Any, value: Any) -> tuple[Any, Any]:
        # Converted here, and not before and after the loop, a float64 sum of float32 takes a third of the time.
        carry = combine(carry, value.astype(carry.dtype))
        return carry, carry.astype(value.dtype)

    rest = first.shape[:axis] + first.shape[axis + 1 :]
    if isinstance(x, tuple):
        begin = tuple(jnp.broadcast_to(s, rest) for s in start)
        done = lax.scan(step, begin, tuple(jnp.moveaxis(v, axis, 0) for v in x))[1]
        return tuple(jnp.moveaxis(v, 0, axis) for v in done)
    return jnp.moveaxis(lax.scan(wider, jnp.broadcast_to(start, rest), jnp.moveaxis(x, axis, 0))[1], 0, axis)


def _running(cx: Context, x: Any, dim: int, combine: Combine, start: float) -> Any:
    """A scan with one operand, rounded to the result's dtype as it goes."""
    x = upcast(at_least_1d(x))
    wide = CPU_ACCUMULATOR.get(np.dtype(x.dtype), x.dtype)
    out = scan(cx, x, axis_of(dim, x.ndim), combine, np.asarray(start, wide))
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
        values, places = scan(cx, (x, index), axis, later, start)
        values = values != 0 if boolean else values
        return lax.reshape(values, self.shape), lax.reshape(places.astype(np.int64), self.shape)


_enter_running_extreme("cummax", True)
_enter_running_extreme("cummin", False)
