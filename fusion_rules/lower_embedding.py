"""Embedding and the losses that index classes: nll_loss, multi_margin_loss, multilabel_margin_loss.

Losses of narrow floats are summed in float32, embedding gradients in their own dtype, as eager does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from .elementwise import as_array, where
from .indexing import as_index, iota, opmath, put_at, spread_line, take_at, zeros
from .lower_index import check_select
from .lowering import Context, NoLowering
from .rule import OpClass, rule

NONE, MEAN, SUM = 0, 1, 2


@rule("embedding.default", OpClass.GATHER)
def embedding(
    cx: Context, weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if weight.shape[0] == 0:
        raise NoLowering("an embedding without rows: eager raises")
    at = as_index(indices)
    check_select(cx, weight, 0, at)
    return take_at(weight, (0,), [at], 0)


@rule("embedding_dense_backward.default", OpClass.SCATTER)
def embedding_dense_backward(
    cx: Context, grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    at = as_index(indices).reshape(-1)
    width = grad_output.shape[-1]
    grad = grad_output.reshape(at.size, width)
    if scale_grad_by_freq:
        ones = lax.full(at.shape, np.int64(1))
        counts = put_at(zeros((num_weights,), np.int64), (0,), [at], 0, ones, "add")
        grad = grad / take_at(counts, (0,), [at], 0).astype(grad.dtype)[:, None]
    if padding_idx >= 0:
        # A position past the end is dropped by the scatter.
        at = where(at == padding_idx, np.int64(num_weights), at)
    return put_at(zeros((num_weights, width), grad.dtype), (0,), [at], 0, grad, "add")


# nll_loss: classes are dimension 1, or dimension 0 of a single sample.


class _Targets:
    """Checked targets of a class loss, and the weight of each (0 where the target is ignored)."""

    def __init__(self, cx: Context, x: Any, target: Any, weight: Any, ignore_index: int):
        self.dim = 0 if x.ndim == 1 else 1
        self.wide = opmath(x.dtype)
        self.classes = x.shape[self.dim]
        # One size-1 dimension where `x` has its classes.
        shape = tuple(1 if d == self.dim else n for d, n in enumerate(x.shape))
        at = as_index(target).reshape(shape)
        self.kept = at != ignore_index
        self.at = where(self.kept, at, np.int64(0))
        cx.check_index(self.at, 0, self.classes, "IndexError", "Target {value} is out of bounds.")
        if weight is None:
            self.weight = lax.full(shape, np.ones((), self.wide))
        else:
            self.weight = take_at(weight.astype(self.wide), (0,), [self.at], 0)
        self.weight = where(self.kept, self.weight, np.zeros((), self.wide))

    def pick(self, x: Any) -> Any:
        """The value of the target class, shape of the targets with a size-1 class dimension."""
        if x.size == 0:
            return zeros(self.at.shape, self.wide)
        places = [self.at if d == self.dim else iota(self.at.shape, d) for d in range(x.ndim)]
        return take_at(x, tuple(range(x.ndim)), places, 0).astype(self.wide)


@rule(["nll_loss_forward.default", "nll_loss2d_forward.default"], OpClass.GATHER)
def nll_loss_forward(
    cx: Context, self: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    t = _Targets(cx, self, target, weight, ignore_index)
    # An ignored target may stand beside an infinite input: 0 times it would be NaN.
    zero = np.zeros((), t.wide)
    if reduction == NONE and self.ndim > 1:
        return where(t.kept, -t.pick(self) * t.weight, zero).reshape(cx.out[0].shape), zeros((), t.wide)
    every = tuple(range(self.ndim))
    # Taken from 0, as in eager: no loss at all is 0.0 and not -0.0.
    loss = zero - lax.reduce_sum(where(t.kept, t.pick(self) * t.weight, zero), every)
    total = lax.reduce_sum(t.weight, every)
    return (loss / total if reduction == MEAN else loss), total


@rule(["nll_loss_backward.default", "nll_loss2d_backward.default"], OpClass.POINTWISE, may_raise=True)
def nll_loss_backward(
    cx: Context, grad_output: Any, self: Any, target: Any, weight: Any, reduction: int, ignore_index: int,
    total_weight: Any,
) -> Any:
    """A select over classes, not a scatter: it fuses with the backward of log_softmax, its usual consumer."""
    t = _Targets(cx, self, target, weight, ignore_index)
    grad = grad_output.astype(t.wide)
    grad = grad.reshape(t.at.shape if grad.size == t.at.size else (1,) * self.ndim)
    if reduction == MEAN:
        grad = grad / total_weight.astype(t.wide).reshape((1,) * self.ndim)
    grad = spread_line(where(t.kept, -t.weight * spread_line(grad, t.at.shape), np.zeros((), t.wide)), self.shape)
    return where(iota(self.shape, t.dim) == spread_line(t.at, self.shape), grad, np.zeros((), t.wide))


# Margin losses. A single sample is a batch of one.


def _mean_of(x: Any, reduction: int) -> Any:
    """Reduce losses `[N]` as the reduction says."""
    if reduction == NONE:
        return x
    total = lax.reduce_sum(x, (0,))
    return total / as_array(x.size, x.dtype) if reduction == MEAN else total


def _grad_of(grad: Any, n: int, reduction: int) -> Any:
    """The gradient of each of `n` losses, shape `[n]`."""
    grad = lax.broadcast(grad.reshape(()), (n,)) if grad.size == 1 else grad.reshape(n)
    return grad / as_array(n, grad.dtype) if reduction == MEAN else grad


def _margins(cx: Context, self: Any, target: Any, margin: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Positive parts of `margin - x[target] + x[j]` with the target left out, the target's mask, and its weight."""
    n, c = self.shape
    at = as_index(target).reshape(n)
    cx.check_index(at, 0, c, "RuntimeError", "target out of range")
    here = iota((n, c), 1) == at[:, None]
    picked = take_at(self, (0, 1), [iota((n,), 0), at], 0)
    z = as_array(margin, self.dtype) - picked[:, None] + self
    # Eager asks whether it is positive, which NaN is not.
    z = where(~here & (z > 0), z, np.zeros((), self.dtype))
    return z, here, None if weight is None else take_at(weight, (0,), [at], 0)[:, None]


@rule("multi_margin_loss.default", OpClass.REDUCTION, keep=["p"], may_raise=True)
def multi_margin_loss(
    cx: Context, self: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> Any:
    x = self.reshape((-1, self.shape[-1])) if self.ndim else self.reshape(1, 1)
    if x.size == 0:
        raise NoLowering("a margin loss over nothing")
    z, _, w = _margins(cx, x, target, margin, weight)
    z = z if p == 1 else z * z
    losses = lax.reduce_sum(z if w is None else z * w, (1,)) / as_array(x.shape[1], x.dtype)
    return _mean_of(losses, reduction).reshape(cx.out[0].shape)


@rule("multi_margin_loss_backward.default", OpClass.REDUCTION, keep=["p"], may_raise=True)
def multi_margin_loss_backward(
    cx: Context, grad_output: Any, self: Any, target: Any, p: Any, margin: Any, weight: Any = None, reduction: int = 1
) -> Any:
    x = self.reshape((-1, self.shape[-1])) if self.ndim else self.reshape(1, 1)
    if x.size == 0:
        raise NoLowering("a margin loss over nothing")
    z, here, w = _margins(cx, x, target, margin, weight)
    slope = where(z > 0, np.ones((), x.dtype), zeros((), x.dtype)) if p == 1 else z + z
    slope = slope if w is None else slope * w
    slope = slope * (_grad_of(grad_output, x.shape[0], reduction)[:, None] / as_array(x.shape[1], x.dtype))
    # A difference, as in eager: -0.0 it is not.
    return where(here, np.zeros((), x.dtype) - lax.reduce_sum(slope, (1,))[:, None], slope).reshape(self.shape)


def _labels(cx: Context, x: Any, target: Any) -> tuple[Any, Any, Any]:
    """Of targets `[N, C]` that a first -1 ends: which count, their classes, and the mask of classes among them."""
    n, c = x.shape
    at = as_index(target).reshape(n, c)
    cx.check_index(at, -1, c, "RuntimeError", "argument #2 'target' is out of range")
    counts = lax.cumsum((at < 0).astype(np.int32), 1) == 0
    at = lax.clamp(np.int64(0), at, np.int64(c - 1))
    mask = lax.reduce_or((at[:, :, None] == iota((n, c, c), 2)) & counts[:, :, None], (1,))
    return counts, at, mask


def _label_margins(x: Any, counts: Any, at: Any, mask: Any) -> Any:
    """`[N, T, C]` positive parts of `1 - x[target] + x[j]` for targets that count and classes `j` that are none."""
    n, c = x.shape
    picked = take_at(x, (0, 1), [iota((n, c), 0), at], 0)
    z = np.ones((), x.dtype) - picked[:, :, None] + x[:, None, :]
    return where(counts[:, :, None] & ~mask[:, None, :] & (z > 0), z, zeros((), x.dtype))


@rule("multilabel_margin_loss_forward.default", OpClass.REDUCTION, may_raise=True)
def multilabel_margin_loss_forward(cx: Context, self: Any, target: Any, reduction: int) -> tuple[Any, Any]:
    if self.size == 0:
        raise NoLowering("a margin loss over nothing")
    x = self.reshape((-1, self.shape[-1])) if self.ndim else self.reshape(1, 1)
    counts, at, mask = _labels(cx, x, target)
    losses = lax.reduce_sum(_label_margins(x, counts, at, mask), (1, 2)) / as_array(x.shape[1], x.dtype)
    return _mean_of(losses, reduction).reshape(cx.out[0].shape), mask.reshape(cx.out[1].shape)


@rule("multilabel_margin_loss_backward.default", OpClass.REDUCTION, may_raise=True)
def multilabel_margin_loss_backward(
    cx: Context, grad_output: Any, self: Any, target: Any, reduction: int, is_target: Any
) -> Any:
    if self.size == 0:
        return self
    x = self.reshape((-1, self.shape[-1])) if self.ndim else self.reshape(1, 1)
    counts, at, _ = _labels(cx, x, target)
    n, c = x.shape
    z = _label_margins(x, counts, at, is_target.reshape(n, c) != 0)
    active = where(z > 0, np.ones((), x.dtype), zeros((), x.dtype))
    grad = put_at(lax.reduce_sum(active, (1,)), (0, 1), [iota((n, c), 0), at], 0, -lax.reduce_sum(active, (2,)), "add")
    grad = grad * (_grad_of(grad_output, n, reduction)[:, None] / as_array(c, x.dtype))
    return grad.reshape(self.shape)
