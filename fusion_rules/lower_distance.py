"""Distances between the rows of matrices, and their gradients.

All pairs of rows are one broadcast difference; XLA fuses it into the sum over columns, so it is never stored.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from .axes import total
from .elementwise import isnan, spread, where
from .lower_reduce import norm_along, power
from .lowering import Context
from .precision import matmul_precision
from .rule import OpClass, rule


def _differences(x: Any, y: Any, batch: tuple[int, ...]) -> Any:
    """[..., P, M] and [..., R, M] as differences [..., P, R, M]."""
    (p, m), r = x.shape[-2:], y.shape[-2]
    x = spread(lax.reshape(x, (*x.shape[:-1], 1, m)), (*batch, p, r, m))
    y = spread(lax.reshape(y, (*y.shape[:-2], 1, r, m)), (*batch, p, r, m))
    return x - y


def _euclidean(x: Any, y: Any, batch: tuple[int, ...]) -> Any:
    """The distances by ATen's expansion of the square into one product of matrices."""
    x = spread(x, (*batch, *x.shape[-2:]))
    y = spread(y, (*batch, *y.shape[-2:]))
    last = (x.ndim - 1,)
    xx, yy = total(x * x, last), total(y * y, last)
    left = lax.concatenate([x * np.asarray(-2, x.dtype), xx, lax.full_like(xx, 1)], last[0])
    right = lax.concatenate([y, lax.full_like(yy, 1), yy], last[0])
    batches = tuple(range(len(batch)))
    squares = lax.dot_general(left, right, ((last, last), (batches, batches)), precision=matmul_precision())
    return lax.sqrt(lax.max(squares, lax.full_like(squares, 0)))


@rule("_euclidean_dist.default", OpClass.CONTRACTION)
def euclidean_dist(cx: Context, x1: Any, x2: Any) -> Any:
    return _euclidean(x1, x2, cx.out[0].shape[:-2])


@rule("_cdist_forward.default", OpClass.REDUCTION)
def cdist_forward(cx: Context, x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    *batch, rows, columns = cx.out[0].shape
    if 0 in cx.out[0].shape or x1.shape[-1] == 0:
        return lax.full(cx.out[0].shape, 0, x1.dtype)
    if p == 2 and (compute_mode == 1 or (not compute_mode and max(rows, columns) > 25)):
        return _euclidean(x1, x2, tuple(batch))
    return _row_norms(_differences(x1, x2, tuple(batch)), p)


def _unless_nan(x: Any, number: Any) -> Any:
    """A number in place of each element of `x` that is one; NaN stays."""
    return where(isnan(x), x, number)


def _row_norms(difference: Any, p: float) -> Any:
    axis = difference.ndim - 1
    if p == 0:
        # ATen's norm counts a NaN as one element that is not zero, its distances keep it.
        counted = _unless_nan(difference, (difference != 0).astype(difference.dtype))
        return lax.reshape(total(counted, (axis,)), difference.shape[:-1])
    return lax.reshape(norm_along(difference, p, (axis,)), difference.shape[:-1])


def _pull_back(grad: Any, difference: Any, distance: Any, p: float) -> Any:
    """The gradient of a p-distance with respect to the difference; 0 where ATen takes the subgradient 0."""
    if p == 0:
        return lax.full_like(difference, 0)
    if p == 1:
        return grad * lax.sign(difference)
    size = lax.abs(difference)
    if math.isinf(p):
        # Of an infinite distance nobody knows whose it is: the difference of the two is NaN, and so is the gradient.
        rest = size - distance
        return _unless_nan(rest, (rest == 0).astype(rest.dtype)) * lax.sign(difference) * grad
    if p == 2:
        return where(distance == 0, 0, grad * difference / distance)
    if p < 2:
        direction = lax.sign(difference) * power(size, p - 1)
        # Below 1 the slope at 0 is infinite.
        flat = (distance == 0) | (difference == 0) if p < 1 else distance == 0
    else:
        direction, flat = difference * power(size, p - 2), distance == 0
    return where(flat, 0, direction * grad / power(distance, p - 1))


@rule("_cdist_backward.default", OpClass.REDUCTION)
def cdist_backward(cx: Context, grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    shape = cx.out[0].shape
    if 0 in shape or cdist.size == 0:
        return lax.full(shape, 0, x1.dtype)
    difference = _differences(x1, x2, shape[:-2])
    pulled = _pull_back(grad[..., None], difference, cdist[..., None], p)
    return lax.reduce_sum(pulled, (difference.ndim - 2,))


def _pair_number(i: Any, j: Any, n: int) -> Any:
    """The position of the pair `i < j` of `n` rows in the list of all pairs."""
    return i * n - i * (i + 1) // 2 + j - i - 1


@rule("_pdist_forward.default", OpClass.REDUCTION)
def pdist_forward(cx: Context, self: Any, p: float = 2) -> Any:
    n, m = self.shape
    if cx.out[0].numel == 0 or m == 0:
        return lax.full(cx.out[0].shape, 0, self.dtype)
    # The pair's number turned back into the pair: computed, because a list of all pairs would be a large constant.
    number = lax.iota(np.int64, cx.out[0].shape[0])
    half = np.float64(n - 0.5)
    i = (half - lax.sqrt(half * half - 2 * number.astype(np.float64) - 1)).astype(np.int64)
    j = number - _pair_number(i, i + 1, n) + i + 1
    rows = [self.at[k].get(mode="promise_in_bounds") for k in (i, j)]
    return _row_norms(rows[0] - rows[1], p)


@rule("_pdist_backward.default", OpClass.REDUCTION)
def pdist_backward(cx: Context, grad: Any, self: Any, p: float, pdist: Any) -> Any:
    n, m = self.shape
    if grad.size == 0 or m == 0:
        return lax.full(self.shape, 0, self.dtype)
    row, column = (lax.broadcasted_iota(np.int64, (n, n), a) for a in (0, 1))
    number = _pair_number(lax.min(row, column), lax.max(row, column), n)
    number = where(row == column, 0, number)
    grads, distances = (lax.reshape(v.at[number].get(mode="promise_in_bounds"), (n, n, 1)) for v in (grad, pdist))
    # A row's difference to itself is 0, and so is its share, whatever pair 0 says.
    difference = _differences(self, self, ())
    pulled = _pull_back(grads, difference, distances, p)
    return lax.reduce_sum(where(lax.reshape(row == column, (n, n, 1)), 0, pulled), (1,))
