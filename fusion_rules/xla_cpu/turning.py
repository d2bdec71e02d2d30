"""Turning: rows that are to be columns in memory, and the other way round, moved by a loop of its own.

Where a product or a convolution wants its operand the other way round, XLA:CPU turns it in whatever computes it, and
computes it anew for each reader, element by element, in the order of the result. A barrier does not keep it from that.
A loop does: nothing is fused into one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import layout

from ..indexing import unsigned

ROWS = 16  # that are turned at once: a line of the cache in the result. So it takes 0.1 ms for 1 MB
DTYPES = (np.float32, np.float64)  # that XLA:CPU has fast kernels for, which want their operands one way


def turned(x: jax.Array, count: int = 1) -> jax.Array:
    """`count` matrices below each other, transposed: `[count * R, C] -> [count * C, R]`, with `x` computed first.

    R is `ROWS` or more.
    """
    r, c = x.shape[0] // count, x.shape[1]
    blocks = -(-r // ROWS)

    def turn(i: jax.Array, out: jax.Array) -> jax.Array:
        i = unsigned(i)
        # The last block lies over the one before it, so that it ends where the rows do.
        which, row = i // blocks, jnp.minimum(i % blocks * ROWS, r - ROWS)
        part = lax.dynamic_slice_in_dim(x, which * r + row, ROWS)
        return lax.dynamic_update_slice(out, part.T, (which * c, row))

    # It begins with a copy of the operand, of which nothing stays: memory for zeros would be taken when the region
    # begins, and of anything that is computed XLA compiles a loop.
    return lax.fori_loop(0, count * blocks, turn, x.reshape(count * c, r))


def transposed(x: jax.Array, count: int = 1) -> jax.Array:
    """`turned`, if that is worth it."""
    r, c = x.shape[0] // count, x.shape[1]
    if r >= ROWS and x.dtype in DTYPES:
        return turned(x, count)
    return x.reshape(count, r, c).swapaxes(1, 2).reshape(count * c, r)


def by_pixels(x: jax.Array) -> jax.Array:
    """Images, `[N, C, *size]`, with the channels of a pixel together in memory, as XLA:CPU's convolutions have them.

    `x` is computed first, plane by plane.
    """
    n, channels, *size = x.shape
    if not _is_worth_it(x):
        return x
    return jnp.moveaxis(turned(x.reshape(n * channels, -1), n).reshape(n, *size, channels), -1, 1)


def by_planes(x: jax.Array) -> jax.Array:
    """Images, `[N, C, *size]`, with the pixels of a channel together in memory, as torch's are.

    `x` is computed first, pixel by pixel.
    """
    if not _is_worth_it(x):
        return x
    return turned(jnp.moveaxis(x, 1, -1).reshape(-1, x.shape[1]), x.shape[0]).reshape(x.shape)


def left_by_pixels(x: jax.Array) -> jax.Array:
    """Images, `[N, C, *size]`, that are to lie by pixels without being turned: what computes `x` from such images, or
    what is computed from it, is to go on in that order. XLA does so by itself only where that is what is next."""
    return _ordered(x, (0, *range(2, x.ndim), 1)) if _is_worth_it(x) else x


def in_pixels(x: jax.Array) -> jax.Array:
    """Images, `[N, C, *size]`, as `[N, *size, C]` in memory, which a loop does not ask for itself."""
    return _ordered(jnp.moveaxis(x, 1, -1), tuple(range(x.ndim)))


def in_planes(x: jax.Array) -> jax.Array:
    """Images, `[N, *size, C]` in memory, as `[N, C, *size]`."""
    return jnp.moveaxis(_ordered(x, tuple(range(x.ndim))), -1, 1)


def _ordered(x: jax.Array, dimensions: tuple[int, ...]) -> jax.Array:
    """`x`, which lies in memory with these dimensions from far apart to close together."""
    return layout.with_layout_constraint(x, _ORDER(dimensions))


# jax 0.6 has another `Layout`.
_ORDER = getattr(layout, "DeviceLocalLayout", layout.Layout)


def _is_worth_it(x: jax.Array) -> bool:
    wide = x.ndim > 2 and x.size and x.shape[1] >= ROWS and math.prod(x.shape[2:]) >= ROWS
    return bool(wide) and x.dtype in DTYPES
