"""Products of groups of rows on TPUs: JAX's own Pallas kernels (`megablox`), which walk over the tiles that there are.

Their offsets ascend, as running sums do: one below another before it is taken for that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..lower_grouped import rows_by_groups, sums_by_groups
from ..precision import accumulator
from .kernels import exactly

TILES = (512, 256, 128)  # the sides of a tile: the largest that is filled without much more than the array has


def _fits(x: jax.Array, y: jax.Array) -> bool:
    """Whether the kernels take such a call: of bfloat16 or float32, and of whole lanes at least."""
    return x.dtype == y.dtype and x.dtype in (jnp.bfloat16, jnp.float32) and min(*x.shape, *y.shape[-2:]) >= TILES[-1]


def _tile(n: int) -> int:
    return next((t for t in TILES if n % t == 0), TILES[-1])


def _sizes(offsets: jax.Array, rows: int) -> jax.Array:
    """How many rows each group has."""
    ends = jnp.clip(lax.cummax(offsets.astype(jnp.int32)), 0, rows)
    return jnp.diff(ends, prepend=jnp.zeros(1, jnp.int32))


@rows_by_groups.on("tpu")
def by_kernel(x: Any, weights: Any, offsets: Any) -> Any:
    """JAX's kernel `megablox.gmm`, a Pallas kernel; narrow matrices as everywhere"""
    if not _fits(x, weights):
        return rows_by_groups.any(x, weights, offsets)
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    rows, acc = x.shape[0], accumulator(x.dtype)
    given = jnp.pad(x, ((0, -rows % TILES[-1]), (0, 0)))
    tiling = tuple(map(_tile, (given.shape[0], *weights.shape[1:])))

    def call(x: Any, weights: Any, offsets: Any) -> Any:
        made = gmm(x, weights, _sizes(offsets, rows), acc, tiling)
        # Tiles of no group are not written.
        return jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.max(offsets), made, 0)[:rows]

    return exactly(call, x.dtype, given, weights, offsets.astype(jnp.int32))


@sums_by_groups.on("tpu")
def sums_by_kernel(x: Any, y: Any, offsets: Any) -> Any:
    """JAX's kernel `megablox.tgmm`, a Pallas kernel; narrow matrices as everywhere"""
    if not _fits(x, y):
        return sums_by_groups.any(x, y, offsets)
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows, acc = x.shape[0], accumulator(x.dtype)
    left, right = (jnp.pad(t, ((0, -rows % TILES[-1]), (0, 0))) for t in (x, y))
    tiling = tuple(map(_tile, (left.shape[0], x.shape[1], y.shape[1])))

    def call(left: Any, right: Any, offsets: Any) -> Any:
        sizes = _sizes(offsets, rows)
        made = tgmm(left.T, right, sizes, acc, tiling)
        return jnp.where((sizes > 0)[:, None, None], made, 0)  # what has no rows is not written

    return exactly(call, x.dtype, left, right, offsets.astype(jnp.int32))
