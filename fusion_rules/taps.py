"""Linear maps along one dimension that are known while lowering: each output is a weighted sum of a few inputs.

Interpolation is one such map per dimension, and its gradient the transposed map, which is again of this form: every
input gathers the outputs that used it, so nothing is scattered.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Up to this many terms are written out; more become one gather that is summed over a new dimension.
MOST_TERMS = 8


@dataclass(frozen=True)
class Taps:
    """`out[i] = sum over k of in[index[k, i]] * weight[k, i]`; entries with index -1 are absent."""

    size: int
    index: np.ndarray
    weight: np.ndarray

    @property
    def out(self) -> int:
        return self.index.shape[1]

    def transposed(self) -> Taps:
        """The map of gradients."""
        users: list[list[tuple[int, float]]] = [[] for _ in range(self.size)]
        for i in range(self.out):
            # Clamped borders name one input several times. Not merged: ATen adds infinity times 0 there, too.
            for source, weight in zip(self.index[:, i], self.weight[:, i], strict=True):
                if source >= 0:
                    users[source].append((i, weight))
        depth = max((len(u) for u in users), default=0)
        index = np.full((depth, self.size), -1, np.int64)
        weight = np.zeros((depth, self.size))
        for p, found in enumerate(users):
            for k, (i, w) in enumerate(found):
                index[k, p], weight[k, p] = i, w
        return Taps(self.out, index, weight)

    @property
    def plain(self) -> bool:
        """Whether every output is one input, unweighted."""
        return self.index.shape[0] == 1 and bool((self.weight == 1).all()) and bool((self.index >= 0).all())


def _along(values: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    return values.reshape(tuple(-1 if d == axis else 1 for d in range(ndim)))


def _pick(x: jax.Array, index: np.ndarray, axis: int) -> jax.Array:
    """`take` with known indices, as a slice or a repetition where they are regular."""
    n, count = x.shape[axis], len(index)
    if count and (np.diff(index) == (step := index[1] - index[0] if count > 1 else 1)).all() and step > 0:
        return lax.slice_in_dim(x, int(index[0]), int(index[-1]) + 1, int(step), axis)
    if count % n == 0 and (index == np.arange(count) // (count // n)).all():
        return jnp.repeat(x, count // n, axis)
    return jnp.take(x, jnp.asarray(index.astype(np.int32)), axis=axis, mode="clip")


def apply_taps(x: jax.Array, axis: int, taps: Taps) -> jax.Array:
    """Apply the map along `axis`, in the dtype of `x`."""
    if taps.plain:
        return _pick(x, taps.index[0], axis)
    n = x.shape[axis]
    depth = taps.index.shape[0]
    in_order = depth * taps.out == n > 0 and (taps.index.T.reshape(-1) == np.arange(n)).all()
    if in_order and depth > MOST_TERMS and (taps.weight == 1).all():
        # The transpose of a long repetition; a short one is a sum of slices, which is faster.
        return x.reshape(*x.shape[:axis], taps.out, depth, *x.shape[axis + 1 :]).sum(axis + 1)
    if depth > MOST_TERMS:
        at = np.maximum(taps.index, 0).astype(np.int32).reshape(-1)
        shape = (*x.shape[:axis], depth, taps.out, *x.shape[axis + 1 :])
        parts = jnp.take(x, jnp.asarray(at), axis=axis, mode="clip").reshape(shape)
        around = (1,) * axis, (1,) * (x.ndim - axis - 1)
        weight = taps.weight.astype(x.dtype).reshape(*around[0], depth, taps.out, *around[1])
        real = (taps.index >= 0).reshape(weight.shape)
        return jnp.where(real, parts * weight, np.zeros((), x.dtype)).sum(axis)
    total = None
    for index, weight in zip(taps.index, taps.weight, strict=True):
        v = _pick(x, np.maximum(index, 0), axis) * _along(weight.astype(x.dtype), axis, x.ndim)
        if (index < 0).any():
            # Not weight 0: an infinite element that is not part of the sum must not make it nan.
            v = jnp.where(_along(index >= 0, axis, x.ndim), v, np.zeros((), x.dtype))
        total = v if total is None else total + v
    if total is None:
        return jnp.zeros((*x.shape[:axis], taps.out, *x.shape[axis + 1 :]), x.dtype)
    return total
