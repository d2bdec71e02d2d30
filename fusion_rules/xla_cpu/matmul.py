"""Products of matrices on XLA:CPU, whose fast kernels want their operands one way in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import lower_matmul
from ..lower_matmul import MM, product
from ..lowering import Context
from . import turning

MM_BY_ROWS = (((1,), (1,)), ((), ()))

ALIGNED, LARGE = 64, 1 << 16  # elements of a column, of the matrix: others are left as they are


@lower_matmul.left_operand.on("cpu")
def left_operand(x: jax.Array) -> jax.Array:
    """The left operand of a product, whose layout in memory XLA:CPU has to leave as it is.

    It chooses its kernel for bfloat16 and then turns what a clamp or a `where` makes of a transposed matrix, as
    `x.t().clamp(0, 1) @ y` has it: that kernel does not take it, and the run fails (UNIMPLEMENTED).
    """
    return lax.optimization_barrier(x) if x.dtype == jnp.bfloat16 else x


@lower_matmul.matrices.on("cpu")
def matrices(cx: Context, x: jax.Array, y: jax.Array, dtype: Any = None) -> jax.Array:
    """`x @ y` of matrices, not yet rounded, however they lie in memory."""
    if x.shape[0] == 1 and any(y is each for each in cx.places.by_columns):
        # One row times a transposed weight, in every decoder: XLA:CPU makes a product of a vector and what is added to
        # it one loop, for which it first copies the matrix as it is asked for (1x1024x1024: 280 us, 49 so).
        return product(x, y.T, MM_BY_ROWS, dtype)
    return product(_left(cx, x), y, MM, dtype)


def _left(cx: Context, x: jax.Array) -> jax.Array:
    """The left operand of a product, its rows together in memory where the product is faster so.

    A left operand that lies by columns, as in every gradient of a weight, sends the product past the fast kernels of
    XLA:CPU, most of all where a column's stride is a power of two (float32, 1024x1024x256: 5.1 ms, 3.1 with turning it;
    float64 twice as fast in all sizes; neither faster nor slower elsewhere).
    """
    long = x.shape[0] % ALIGNED == 0 and x.shape[1] >= turning.ROWS and x.size >= LARGE
    if x.dtype not in turning.DTYPES or not long or not any(x is each for each in cx.places.by_columns):
        return x
    # Turned in a loop: fused with what makes it, it would be computed once more, element by element (a GPT's training
    # step: 650 ms instead of 460).
    return turning.turned(x.T)
