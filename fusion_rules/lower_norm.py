"""Layer, RMS, group and weight normalisation, forward and backward.

Statistics are those of `axes.moments`; backward passes use the centred input, where ATen multiplies out, because it
costs nothing in a fused loop and loses no digits. Half types are computed in float32, as in ATen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .axes import Axes, again, average, axis_of, count, moments, quotient, running, separated, sum_over, total, upcast
from .elementwise import hidden, need, spread
from .lowering import Context
from .rule import OpClass, rule


def reciprocal_root(variance: Any, eps: float) -> Any:
    """`1 / sqrt(variance + eps)`, each step correctly rounded: XLA's own reciprocal root is one off on some processors,
    and it makes one of the two steps unless it is kept from seeing both.
    """
    root = hidden(lax.sqrt(variance + np.asarray(eps, variance.dtype)))
    return lax.div(lax.full_like(root, 1), root)


def channels(v: Any, ndim: int, axis: int = 1) -> Any:
    """A vector over one axis, ready to broadcast against an array of `ndim` dimensions, upcast."""
    return lax.expand_dims(upcast(v), [a for a in range(ndim) if a != axis])


def affine(x: Any, weight: Any, bias: Any) -> Any:
    """`x * weight + bias`, each of which may be None; both broadcast against the last axes of `x`."""
    if weight is not None:
        x = x * spread(upcast(weight).astype(x.dtype), x.shape)
    return x if bias is None else x + spread(upcast(bias).astype(x.dtype), x.shape)


def wanted(mask: Sequence[bool], *results: Any) -> tuple[Any, ...]:
    """The results whose flag in an `output_mask` is set."""
    return tuple(r for r, keep in zip(results, mask, strict=True) if keep)


# --- layer and RMS norm: statistics over the last axes


def _last(ndim: int, normalized_shape: Sequence[int]) -> Axes:
    return tuple(range(ndim - len(normalized_shape), ndim))


def _nothing(sums: Any) -> Any:
    """0 for each sum that is a number, NaN for the others: eager's gradients subtract one product of it from another,
    so that all of a row whose sum is infinite is NaN."""
    return sums - sums


@rule("native_layer_norm.default", OpClass.NORMALIZATION)
def layer_norm(cx: Context, input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    x = upcast(input)
    axes = _last(x.ndim, normalized_shape)
    mean, _, squares = moments(x, axes)
    rstd = reciprocal_root(quotient(squares, count(x, axes)), eps)
    centre, scale = separated(cx, x, mean, rstd)
    return affine((x - centre) * scale, weight, bias), running(mean), rstd


@rule("native_layer_norm_backward.default", OpClass.NORMALIZATION)
def layer_norm_backward(
    cx: Context,
    grad_out: Any,
    input: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Any:
    dy, x = upcast(grad_out), upcast(input)
    axes = _last(x.ndim, normalized_shape)
    # The gradient of normalising one number is 0 exactly; eager's rounding errors, times 1/eps, are not.
    need(count(x, axes) != 1 or not output_mask[0], "eager's result is rounding error alone")
    rest = tuple(range(x.ndim - len(axes)))
    mean, rstd = upcast(mean).astype(x.dtype), upcast(rstd).astype(x.dtype)
    # Three loops over `x` and `dy`, none of which should wait for what another one stores.
    gamma = upcast(weight).astype(x.dtype) if weight is not None else lax.full(normalized_shape, 1, x.dtype)
    mean_2, rstd_2, gamma_2 = again(mean, rstd, gamma)
    mean_3, gamma_3 = again(mean_2, gamma_2)
    offset = average(affine(dy, gamma, None), axes)
    slope = average(affine(dy, gamma_2, None) * (x - mean), axes) * rstd * rstd + _nothing(offset)
    offset, slope = separated(cx, x, offset, slope)
    dx = (affine(dy, gamma_3, None) - offset - (x - mean_2) * slope) * rstd
    dgamma = sum_over(dy * ((x - mean_3) * rstd_2), rest)
    return wanted(output_mask, dx, dgamma, sum_over(dy, rest))


@rule("_fused_rms_norm.default", OpClass.NORMALIZATION)
def rms_norm(cx: Context, input: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Any:
    x = upcast(input)
    axes = _last(x.ndim, normalized_shape)
    rstd = reciprocal_root(average(x * x, axes), np.finfo(x.dtype).eps if eps is None else eps)
    return affine(x * separated(cx, x, rstd)[0], weight, None), rstd


@rule("_fused_rms_norm_backward.default", OpClass.NORMALIZATION, defines=True)
def rms_norm_backward(
    cx: Context,
    grad_out: Any,
    input: Any,
    normalized_shape: Sequence[int],
    rstd: Any,
    weight: Any,
    output_mask: Sequence[bool],
) -> Any:
    dy, x = upcast(grad_out), upcast(input)
    axes = _last(x.ndim, normalized_shape)
    rstd = upcast(rstd).astype(x.dtype)
    normal = x * rstd
    scaled = affine(dy, weight, None)
    dx = (scaled - normal * average(scaled * normal, axes)) * rstd
    return wanted(output_mask, dx, sum_over(dy * normal, tuple(range(x.ndim - len(axes)))))


# --- group norm: statistics over the channels of a group and all positions


@rule("native_group_norm.default", OpClass.NORMALIZATION)
def group_norm(
    cx: Context, input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    x = lax.reshape(upcast(input), (N, group, C // group, HxW))
    mean, _, squares = moments(x, (2, 3))
    rstd = reciprocal_root(quotient(squares, count(x, (2, 3))), eps)
    # As in ATen, one slope and one offset per channel.
    slope = rstd if weight is None else rstd * lax.reshape(upcast(weight).astype(x.dtype), (1, group, C // group, 1))
    offset = -mean * slope
    if bias is not None:
        offset = offset + lax.reshape(upcast(bias).astype(x.dtype), (1, group, C // group, 1))
    slope, offset = separated(cx, x, slope, offset)
    y = x * slope + offset
    return lax.reshape(y, input.shape), lax.reshape(running(mean), (N, group)), lax.reshape(rstd, (N, group))


@rule("native_group_norm_backward.default", OpClass.NORMALIZATION)
def group_norm_backward(
    cx: Context,
    grad_out: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Any:
    shape = (N, group, C // group, HxW)
    dy, x = lax.reshape(upcast(grad_out), shape), lax.reshape(upcast(input), shape)
    mean = lax.reshape(upcast(mean).astype(x.dtype), (N, group, 1, 1))
    rstd = lax.reshape(upcast(rstd).astype(x.dtype), (N, group, 1, 1))
    # Sums over positions first: they serve the input's gradient and the parameters'.
    by_channel = total(dy, (3,))
    by_channel_dot = total(dy * (x - again(mean)[0]), (3,))
    scale = 1 if weight is None else lax.reshape(upcast(weight).astype(x.dtype), (1, group, C // group, 1))
    n = count(x, (2, 3))
    offset = quotient(total(by_channel * scale, (2,)), n)
    slope = quotient(total(by_channel_dot * scale, (2,)) * rstd * rstd, n) + _nothing(offset)
    offset, slope = separated(cx, x, offset, slope)
    dx = (dy * scale - offset - (x - mean) * slope) * rstd
    dgamma = lax.reduce_sum(by_channel_dot * rstd, (0, 3))
    dbeta = lax.reduce_sum(by_channel, (0, 3))
    return wanted(output_mask, lax.reshape(dx, input.shape), lax.reshape(dgamma, (C,)), lax.reshape(dbeta, (C,)))


# --- weight norm: a direction `v` and, along one dimension, lengths `g`


@rule("_weight_norm_interface.default", OpClass.NORMALIZATION)
def weight_norm(cx: Context, v: Any, g: Any, dim: int = 0) -> Any:
    axes = tuple(a for a in range(v.ndim) if a != axis_of(dim, v.ndim))
    x = upcast(v)
    norms = lax.sqrt(total(x * x, axes))
    return x * (upcast(g).astype(x.dtype) / norms), norms


@rule("_weight_norm_interface_backward.default", OpClass.NORMALIZATION)
def weight_norm_backward(cx: Context, grad_w: Any, saved_v: Any, saved_g: Any, saved_norms: Any, dim: int) -> Any:
    axes = tuple(a for a in range(saved_v.ndim) if a != axis_of(dim, saved_v.ndim))
    dw, v = upcast(grad_w), upcast(saved_v)
    norms = upcast(saved_norms).astype(v.dtype)
    along = total(dw * v, axes)
    dv = upcast(saved_g).astype(v.dtype) / norms * (dw - v * (along / (norms * norms)))
    return dv, along / norms
