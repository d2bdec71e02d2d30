"""Batch normalisation in all the shapes that ATen gives it.

The overloads differ in which results they return; all of them are one computation. Those that update the running
statistics return the new ones: the caller writes them where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .axes import again, centre, count, quotient, total, upcast
from .elementwise import as_array
from .lower_norm import channels, reciprocal_root, wanted
from .lowering import Context
from .precision import rounded
from .rule import OpClass, rule
from .spec import Spec


def _squeezed(x: Any) -> Any:
    # XLA:CPU reduces [N, C, 1, 1] over (0, 2, 3) in a strided loop that is 5 times slower than [N, C] over 0.
    return lax.reshape(x, x.shape[:2]) if x.ndim > 2 and count(x, tuple(range(2, x.ndim))) == 1 else x


def _channel_is_last(out: Spec) -> bool:
    return len(out.shape) == 2 or math.prod(out.shape[2:]) == 1 or (out.strides[1] == 1 and out.shape[1] > 1)


def _flat(v: Any) -> Any:
    return lax.reshape(v, (v.size,))


def _inverse_deviation(variance: Any, eps: float) -> Any:
    inverse = reciprocal_root(variance, eps)
    return inverse if eps else lax.select(variance == 0, lax.full_like(variance, 0), inverse)


def _blend(running: Any, new: Any, momentum: Any) -> Any:
    # ATen blends in double; a handful of channels costs nothing.
    share = as_array(momentum, np.float64)
    return (share * _flat(new).astype(np.float64) + (1 - share) * running.astype(np.float64)).astype(running.dtype)


class Normalized:
    """The results of one batch norm: `out`, and per channel `mean`, `invstd` (batch or running), new running values."""

    def __init__(
        self,
        cx: Context,
        x: Any,
        weight: Any,
        bias: Any,
        running: tuple[Any, Any],
        training: bool,
        momentum: Any,
        eps: float,
    ):
        shape = x.shape
        x = upcast(_squeezed(x))
        axes = tuple(a for a in range(x.ndim) if a != 1)
        self.running = running
        if training:
            n = count(x, axes)
            # ATen keeps every statistic in the dtype that it saves, and goes on from there. Only its kernel for
            # inputs with the channel outside takes the variance about the unrounded mean.
            exact = centre(x, axes)
            mean = rounded(exact, cx.out[1].dtype)
            centred = x - (mean if _channel_is_last(cx.out[0]) else exact)
            squares = rounded(total(centred * centred, axes), cx.out[1].dtype)
            invstd = _inverse_deviation(quotient(squares, n), eps)
            if running[0] is not None and running[1] is not None:
                unbiased = quotient(squares, n - 1)
                self.running = _blend(running[0], mean, momentum), _blend(running[1], unbiased, momentum)
            invstd = rounded(invstd, cx.out[2].dtype)
        else:
            mean = channels(running[0], x.ndim).astype(x.dtype)
            invstd = _inverse_deviation(channels(running[1], x.ndim).astype(x.dtype), eps)
        slope = invstd if weight is None else invstd * channels(weight, x.ndim).astype(x.dtype)
        offset = -mean * slope
        offset = offset if bias is None else offset + channels(bias, x.ndim).astype(x.dtype)
        self.out = lax.reshape(x * slope + offset, shape)
        self.mean, self.invstd = _flat(mean), _flat(invstd)


def _saved(cx: Context, i: int, value: Any) -> Any:
    # In evaluation the saved statistics are empty tensors.
    return value if cx.out[i].numel else lax.full(cx.out[i].shape, 0, value.dtype)


@rule("native_batch_norm.default", OpClass.NORMALIZATION, hoist=["momentum"])
def batch_norm(
    cx: Context,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: Any,
    eps: float,
) -> Any:
    # With five outputs asked for, results 4 and 5 are the new running statistics: the schema hides that
    # training writes them.
    done = Normalized(cx, input, weight, bias, (running_mean, running_var), training, momentum, eps)
    saved = done.out, _saved(cx, 1, done.mean), _saved(cx, 2, done.invstd)
    return (*saved, *done.running)[: len(cx.out)]


@rule("_native_batch_norm_legit_functional.default", OpClass.NORMALIZATION, hoist=["momentum"])
def batch_norm_functional(
    cx: Context,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: Any,
    eps: float,
) -> Any:
    done = Normalized(cx, input, weight, bias, (running_mean, running_var), training, momentum, eps)
    return (done.out, _saved(cx, 1, done.mean), _saved(cx, 2, done.invstd), *done.running)[: len(cx.out)]


@rule("_native_batch_norm_legit.no_stats", OpClass.NORMALIZATION, hoist=["momentum"])
def batch_norm_no_stats(
    cx: Context, input: Any, weight: Any, bias: Any, training: bool, momentum: Any, eps: float
) -> Any:
    # Without running statistics there is nothing but the batch to normalise by, whatever `training` says.
    done = Normalized(cx, input, weight, bias, (None, None), True, momentum, eps)
    return done.out, _saved(cx, 1, done.mean), _saved(cx, 2, done.invstd)


@rule("_batch_norm_with_update_functional.default", OpClass.NORMALIZATION, hoist=["momentum"])
def batch_norm_with_update(
    cx: Context, input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: Any, eps: float
) -> Any:
    done = Normalized(cx, input, weight, bias, (running_mean, running_var), True, momentum, eps)
    reserve = lax.full(cx.out[3].shape, 0, np.uint8)
    return (done.out, done.mean, done.invstd, reserve, *done.running)[: len(cx.out)]


@rule("_native_batch_norm_legit_no_training.default", OpClass.NORMALIZATION, hoist=["momentum"])
def batch_norm_no_training(
    cx: Context, input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: Any, eps: float
) -> Any:
    done = Normalized(cx, input, weight, bias, (running_mean, running_var), False, momentum, eps)
    return done.out, _saved(cx, 1, done.mean), _saved(cx, 2, done.invstd)


@rule("_batch_norm_no_update.default", OpClass.NORMALIZATION, hoist=["momentum"])
def batch_norm_no_update(
    cx: Context, input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: Any, eps: float
) -> Any:
    done = Normalized(cx, input, weight, bias, (running_mean, running_var), False, momentum, eps)
    reserve = lax.full(cx.out[3].shape, 0, np.uint8)
    return done.out, _saved(cx, 1, done.mean), _saved(cx, 2, done.invstd), reserve


@rule("native_batch_norm_backward.default", OpClass.NORMALIZATION)
def batch_norm_backward(
    cx: Context,
    grad_out: Any,
    input: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    dy, x = upcast(_squeezed(grad_out)), upcast(_squeezed(input))
    axes = tuple(a for a in range(x.ndim) if a != 1)
    if train:
        mean, invstd = channels(save_mean, x.ndim).astype(x.dtype), channels(save_invstd, x.ndim).astype(x.dtype)
    else:
        mean = channels(running_mean, x.ndim).astype(x.dtype)
        invstd = _inverse_deviation(channels(running_var, x.ndim).astype(x.dtype), eps)
    sums, dots = total(dy, axes), total(dy * (x - again(mean)[0]), axes)
    gain = invstd if weight is None else invstd * channels(weight, x.ndim).astype(x.dtype)
    if train:
        n = count(x, axes)
        gain, offset, slope = again(gain, quotient(sums, n), quotient(dots * invstd * invstd, n))
        dx = (dy - offset - (x - mean) * slope) * gain
    else:
        dx = dy * gain
    return wanted(output_mask, lax.reshape(dx, input.shape), _flat(dots * invstd), _flat(sums))


@rule("batch_norm_backward.default", OpClass.NORMALIZATION)
def batch_norm_backward_with_reserve(
    cx: Context,
    grad_out: Any,
    input: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Any,
) -> Any:
    statistics = running_mean, running_var, save_mean, save_var
    return batch_norm_backward(cx, grad_out, input, weight, *statistics, update, eps, output_mask)
