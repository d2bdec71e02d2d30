"""Softmax and its relatives along one dimension."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from .axes import at_least_1d, axis_of, peak, separated, total, upcast
from .elementwise import convert, where
from .lowering import Context
from .precision import rounded
from .rule import OpClass, rule


def _top(cx: Context, x: Any, axis: int) -> Any:
    return separated(cx, x, peak(x, (axis,)))[0]


def softmax_along(cx: Context, x: Any, axis: int) -> Any:
    """Softmax of a float array; a row of -inf gives NaN, as in eager."""
    return _below(cx, x, _top(cx, x, axis), axis)


def safe_softmax_along(cx: Context, x: Any, axis: int) -> Any:
    """Softmax of a float array in which a row of -inf, where everything is masked, gives 0 and not NaN."""
    top = _top(cx, x, axis)
    return where(top == -np.inf, 0, _below(cx, x, top, axis))


def _below(cx: Context, x: Any, top: Any, axis: int) -> Any:
    powers = lax.exp(x - top)
    return powers / separated(cx, x, total(powers, (axis,)))[0]


def _prepared(self: Any, dim: int) -> tuple[Any, int]:
    return upcast(at_least_1d(self)), axis_of(dim, self.ndim)


@rule("_softmax.default", OpClass.NORMALIZATION)
def softmax(cx: Context, self: Any, dim: int, half_to_float: bool) -> Any:
    return lax.reshape(softmax_along(cx, *_prepared(self, dim)), self.shape)


@rule("_log_softmax.default", OpClass.NORMALIZATION)
def log_softmax(cx: Context, self: Any, dim: int, half_to_float: bool) -> Any:
    x, axis = _prepared(self, dim)
    shifted = x - _top(cx, x, axis)
    sums = separated(cx, x, total(lax.exp(shifted), (axis,)))[0]
    if axis == x.ndim - 1:
        # ATen's kernel for the last dimension keeps the sum and its logarithm in the result's dtype.
        dtype = cx.out[0].dtype
        return lax.reshape(shifted - rounded(lax.log(rounded(sums, dtype)), dtype), self.shape)
    return lax.reshape(shifted - lax.log(sums), self.shape)


@rule("_softmax_backward_data.default", OpClass.NORMALIZATION)
def softmax_backward(cx: Context, grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    grad, axis = _prepared(grad_output, dim)
    y = upcast(at_least_1d(output))
    return lax.reshape((grad - separated(cx, grad, total(grad * y, (axis,)))[0]) * y, output.shape)


@rule("_log_softmax_backward_data.default", OpClass.NORMALIZATION)
def log_softmax_backward(cx: Context, grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    grad, axis = _prepared(grad_output, dim)
    y = upcast(at_least_1d(output))
    return lax.reshape(grad - lax.exp(y) * separated(cx, grad, total(grad, (axis,)))[0], output.shape)


@rule("_safe_softmax.default", OpClass.NORMALIZATION)
def safe_softmax(cx: Context, self: Any, dim: int, dtype: Any = None) -> Any:
    return lax.reshape(
        safe_softmax_along(cx, *_prepared(self if dtype is None else convert(self, dtype), dim)), self.shape
    )


def _mask_like(mask: Any, x: Any, mask_type: int | None) -> Any:
    """A mask of attention scores [B, H, L, L] in their shape: type 0 is [L, L], type 1 is [B, L], else it fits."""
    if mask_type == 0:
        mask = lax.reshape(mask, (1, 1, *mask.shape))
    elif mask_type == 1:
        mask = lax.reshape(mask, (mask.shape[0], 1, 1, mask.shape[1]))
    return lax.broadcast_in_dim(mask, x.shape, tuple(range(x.ndim)))


@rule("_masked_softmax.default", OpClass.NORMALIZATION)
def masked_softmax(cx: Context, self: Any, mask: Any, dim: int | None = None, mask_type: int | None = None) -> Any:
    x = upcast(at_least_1d(self))
    axis = axis_of(self.ndim - 1 if dim is None else dim, self.ndim)
    if self.ndim == 0:
        mask = at_least_1d(mask)
    mask = _mask_like(mask, x, mask_type)
    return lax.reshape(softmax_along(cx, where(mask, -np.inf, x), axis), self.shape)


@rule("_masked_softmax_backward.default", OpClass.NORMALIZATION)
def masked_softmax_backward(cx: Context, grad_output: Any, output: Any, mask: Any, dim: int | None = None) -> Any:
    grad, y = upcast(at_least_1d(grad_output)), upcast(at_least_1d(output))
    axis = axis_of(output.ndim - 1 if dim is None else dim, output.ndim)
    masked = lax.reshape(mask, y.shape)
    along = total(where(masked, 0, grad * y), (axis,))
    return lax.reshape(where(masked, 0, (grad - along) * y), output.shape)
