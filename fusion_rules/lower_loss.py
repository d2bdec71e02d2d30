"""Losses over pairs of numbers, their reduction, and their derivatives."""

from __future__ import annotations

from typing import Any

from jax import lax

from .axes import average, total
from .elementwise import as_array, divide, narrow, where
from .lower_activation import log_sigmoid
from .lower_compare import at_least
from .lowering import Context
from .rule import OpClass, Promote, rule

NONE, MEAN, SUM = 0, 1, 2


def _reduced(cx: Context, loss: Any, reduction: int) -> Any:
    if reduction == NONE:
        return loss
    axes = tuple(range(loss.ndim))
    return lax.reshape((average if reduction == MEAN else total)(loss, axes), cx.out[0].shape)


def _shared(grad_output: Any, like: Any, reduction: int) -> Any:
    """What every element gets of the incoming gradient."""
    return divide(grad_output, as_array(like.size, like.dtype)) if reduction == MEAN else grad_output


def _loss(name: str, may_raise: bool = False) -> Any:
    return rule(f"{name}.default", OpClass.REDUCTION, promote=Promote.DEFAULT, may_raise=may_raise)


def _derivative(name: str) -> Any:
    return rule(f"{name}.default", OpClass.POINTWISE, promote=Promote.DEFAULT)


@_loss("mse_loss")
def mse_loss(cx: Context, self: Any, target: Any, reduction: int = MEAN) -> Any:
    error = self - target
    return _reduced(cx, error * error, reduction)


@_derivative("mse_loss_backward")
def mse_loss_backward(cx: Context, grad_output: Any, self: Any, target: Any, reduction: int) -> Any:
    return 2 * (self - target) * _shared(grad_output, self, reduction)


@_loss("smooth_l1_loss")
def smooth_l1_loss(cx: Context, self: Any, target: Any, reduction: int = MEAN, beta: float = 1.0) -> Any:
    beta = as_array(beta, self.dtype)
    error = lax.abs(self - target)
    return _reduced(cx, where(error < beta, divide(error * error, 2 * beta), error - beta / 2), reduction)


@_derivative("smooth_l1_loss_backward")
def smooth_l1_loss_backward(
    cx: Context, grad_output: Any, self: Any, target: Any, reduction: int, beta: float
) -> Any:
    grad, error, beta = _shared(grad_output, self, reduction), self - target, as_array(beta, self.dtype)
    return where(error <= -beta, -grad, where(error >= beta, grad, divide(error * grad, beta)))


@_loss("huber_loss")
def huber_loss(cx: Context, self: Any, target: Any, reduction: int = MEAN, delta: float = 1.0) -> Any:
    delta = as_array(delta, self.dtype)
    error = lax.abs(self - target)
    near, far = error * error / 2, delta * (error - delta / 2)
    return _reduced(cx, where(error <= delta, near, far), reduction)


@_derivative("huber_loss_backward")
def huber_loss_backward(cx: Context, grad_output: Any, self: Any, target: Any, reduction: int, delta: float) -> Any:
    grad, error, delta = _shared(grad_output, self, reduction), self - target, as_array(delta, self.dtype)
    return where(error < -delta, -grad * delta, where(error > delta, grad * delta, error * grad))


@_loss("soft_margin_loss")
def soft_margin_loss(cx: Context, self: Any, target: Any, reduction: int = MEAN) -> Any:
    return _reduced(cx, lax.log1p(_grown(cx, self, target)), reduction)


def _grown(cx: Context, self: Any, target: Any) -> Any:
    # ATen stores each step: float16 ends at 65504, from where on it is infinite.
    return narrow(cx, lax.exp(narrow(cx, -target * self)))


@_derivative("soft_margin_loss_backward")
def soft_margin_loss_backward(cx: Context, grad_output: Any, self: Any, target: Any, reduction: int) -> Any:
    # Not the stabler sigmoid: where eager overflows to NaN, so do we.
    grown = _grown(cx, self, target)
    return target * grown * -_shared(as_array(1, self.dtype), self, reduction) / (grown + 1) * grad_output


# Cross entropy of two outcomes. Eager refuses probabilities outside [0, 1], and bounds logarithms at -100.


@_loss("binary_cross_entropy", may_raise=True)
def binary_cross_entropy(
    cx: Context, self: Any, target: Any, weight: Any = None, reduction: int = MEAN
) -> Any:
    for x, name in (self, "input"), (target, "target"):
        cx.check(~((x >= 0) & (x <= 1)).all(), "RuntimeError", f"all elements of {name} should be between 0 and 1")
    hit, miss = at_least(lax.log(self), -100), at_least(lax.log1p(-self), -100)
    loss = (target - 1) * miss - target * hit
    return _reduced(cx, loss if weight is None else loss * weight, reduction)


@_derivative("binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    cx: Context, grad_output: Any, self: Any, target: Any, weight: Any = None, reduction: int = MEAN
) -> Any:
    variance = at_least((1 - self) * self, as_array(1e-12, self.dtype))
    grad = _shared(grad_output, self, reduction) * (self - target) / variance
    return grad if weight is None else grad * weight


@_loss("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    cx: Context, self: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> Any:
    # ATen composes this from ops, so half precision rounds at each of them, and the difference shows it.
    certainty = narrow(cx, log_sigmoid(self))
    if pos_weight is not None:
        certainty = narrow(cx, certainty * narrow(cx, narrow(cx, (pos_weight - 1) * target) + 1))
    loss = narrow(cx, narrow(cx, narrow(cx, 1 - target) * self) - certainty)
    return _reduced(cx, loss if weight is None else narrow(cx, loss * weight), reduction)
