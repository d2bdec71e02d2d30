"""Padding by a constant, by reflection and by the edge, and their gradients.

Reflection and replication gather at constant positions: on XLA:CPU a third of the time of joining the reversed borders
to the middle. Their gradients are slices, reversals and pads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from .indexing import fill_value, opmath, take_at
from .lowering import Context
from .rule import OpClass, rule


def _edges(ndim: int, pad: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """`(dimension, before, after)`: torch lists the last dimension first."""
    for k in range(len(pad) // 2):
        yield ndim - 1 - k, pad[2 * k], pad[2 * k + 1]


def _grow(x: Any, dim: int, before: int, after: int) -> Any:
    """Zeros on both sides of one dimension; negative amounts cut elements off."""
    return lax.pad(x, np.zeros((), x.dtype), [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)])


# The value is structural: XLA folds a pad into a convolution or a window only if it is a constant.
@rule("constant_pad_nd.default", OpClass.SHAPE, keep=["value"], may_raise=True)
def constant_pad_nd(cx: Context, self: Any, pad: Sequence[int], value: Any = 0) -> Any:
    edges = [(0, 0, 0)] * self.ndim
    for dim, before, after in _edges(self.ndim, pad):
        edges[dim] = (before, after, 0)
    return lax.pad(self, fill_value(cx, value, cx.out[0].dtype), edges)


def _mirrored(n: int, before: int, after: int) -> np.ndarray:
    """Which of `n` elements reflection puts where; the edge itself is not repeated."""
    k = np.abs(np.arange(-before, n + after))
    return k - 2 * np.maximum(k - (n - 1), 0)


def _repeated(n: int, before: int, after: int) -> np.ndarray:
    """Which of `n` elements replication puts where."""
    return np.clip(np.arange(-before, n + after), 0, n - 1)


def _unmirrored(front: Any, behind: Any, dim: int, n: int) -> tuple[Any, Any]:
    """The gradients of the two mirrored borders, each at its place among `n` elements."""
    a, b = front.shape[dim], behind.shape[dim]
    return _grow(lax.rev(front, (dim,)), dim, 1, n - 1 - a), _grow(lax.rev(behind, (dim,)), dim, n - 1 - b, 1)


def _unrepeated(front: Any, behind: Any, dim: int, n: int) -> tuple[Any, Any]:
    """The gradients of the two repeated borders: sums, at the first and at the last of `n` elements."""

    def total(x: Any) -> Any:
        return lax.expand_dims(lax.reduce_sum(x, (dim,)), (dim,))

    return _grow(total(front), dim, 0, n - 1), _grow(total(behind), dim, n - 1, 0)


def _enter(
    name: str,
    ranks: int,
    sources: Callable[[int, int, int], np.ndarray],
    gradients: Callable[[Any, Any, int, int], tuple[Any, Any]],
) -> None:
    """Rows `name{k}d` and `name{k}d_backward` for k spatial dimensions."""

    def forward(cx: Context, self: Any, padding: Sequence[int]) -> Any:
        for dim, before, after in _edges(self.ndim, padding):
            self = take_at(self, (dim,), [sources(self.shape[dim], before, after)], dim)
        return self

    def backward(cx: Context, grad_output: Any, self: Any, padding: Sequence[int]) -> Any:
        g = grad_output.astype(opmath(grad_output.dtype))
        for dim, before, after in reversed(list(_edges(self.ndim, padding))):
            n, m = self.shape[dim], g.shape[dim]
            front = lax.slice_in_dim(g, 0, max(before, 0), 1, dim)
            behind = lax.slice_in_dim(g, m - max(after, 0), m, 1, dim)
            core = _grow(g, dim, -before, -after)
            first, last = gradients(front, behind, dim, n)
            core = core + first if before > 0 else core
            g = core + last if after > 0 else core
        return g

    rule([f"{name}{k}d.default" for k in range(1, ranks + 1)], OpClass.SHAPE)(forward)
    rule([f"{name}{k}d_backward.default" for k in range(1, ranks + 1)], OpClass.SHAPE)(backward)


_enter("reflection_pad", 3, _mirrored, _unmirrored)
_enter("replication_pad", 3, _repeated, _unrepeated)
