"""Activation functions of `torch.nn.functional`, and their derivatives.

Formulas are those of ATen's kernels, half precision computed in float32 and rounded once. Derivatives take what ATen
saved: the input, or the result where ATen derives from that (sigmoid, tanh, in-place elu).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from .elementwise import as_array, by_tensors, divide, enter_unary, isnan, kind, narrow, spread, torch_makes_nan, where
from .lower_compare import at_least, at_most
from .lowering import Context, cast, computation_dtype
from .rule import OpClass, Promote, rule
from .spec import JAX_DTYPE


def _pointwise(*ops: str) -> Any:
    return rule([f"{op}.default" for op in ops], OpClass.POINTWISE, promote=Promote.DEFAULT)


def _conj(x: Any) -> Any:
    return lax.conj(x) if kind(x) == "c" else x


def _sigmoid(x: Any) -> Any:
    return lax.logistic(x)


def relu(x: Any) -> Any:
    """max(x, 0), where -0.0 and NaN stay what they are."""
    return where(x < 0, 0, x)


def _hardsigmoid(x: Any) -> Any:
    return divide(at_most(at_least(x + 3, 0), 6), 6)


def _softplus_of(x: Any) -> Any:
    return lax.log1p(lax.exp(x))


def log_sigmoid(x: Any) -> Any:
    return at_most(x, 0) - lax.log1p(lax.exp(-lax.abs(x)))


enter_unary(
    {
        "hardsigmoid": _hardsigmoid,
        "hardswish": lambda x: divide(x * at_most(at_least(x + 3, 0), 6), 6),
        "mish": lambda x: x * lax.tanh(_softplus_of(x)),
        "relu": relu,
        "silu": lambda x: x / (1 + lax.exp(-x)),
    },
    Promote.DEFAULT,
)


# Derivatives from the result.


@_pointwise("sigmoid_backward")
def sigmoid_backward(cx: Context, grad_output: Any, output: Any) -> Any:
    return grad_output * _conj(1 - output) * _conj(output)


@_pointwise("tanh_backward")
def tanh_backward(cx: Context, grad_output: Any, output: Any) -> Any:
    return grad_output * _conj(1 - output * output)


# Smooth ones.


@_pointwise("gelu")
def gelu(cx: Context, self: Any, *, approximate: str = "none") -> Any:
    half = as_array(0.5, self.dtype)
    if approximate == "tanh":
        return half * self * (1 + lax.tanh(_gelu_inner(self)))
    smooth = self * half * (1 + lax.erf(self * as_array(math.sqrt(0.5), self.dtype)))
    if torch_makes_nan(torch.nn.functional.gelu, (math.inf,), cx.out[0].dtype):
        return where(self == np.inf, np.nan, smooth)
    return smooth


def _gelu_inner(x: Any) -> Any:
    return as_array(math.sqrt(2 / math.pi), x.dtype) * (x + as_array(0.044715, x.dtype) * x * x * x)


@_pointwise("gelu_backward")
def gelu_backward(cx: Context, grad_output: Any, self: Any, *, approximate: str = "none") -> Any:
    x, half = self, as_array(0.5, self.dtype)
    if approximate == "tanh":
        bend = lax.tanh(_gelu_inner(x))
        slope = as_array(math.sqrt(2 / math.pi), x.dtype) * (1 + as_array(3 * 0.044715, x.dtype) * x * x)
        return grad_output * (half * (1 + bend) + half * x * (1 - bend * bend) * slope)
    below = half * (1 + lax.erf(x * as_array(math.sqrt(0.5), x.dtype)))
    density = lax.exp(x * x * -half) * as_array(1 / math.sqrt(2 * math.pi), x.dtype)
    return grad_output * (below + x * density)


@_pointwise("silu_backward")
def silu_backward(cx: Context, grad_output: Any, self: Any) -> Any:
    gate = _sigmoid(self)
    return grad_output * gate * (1 + self * (1 - gate))


@_pointwise("mish_backward")
def mish_backward(cx: Context, grad_output: Any, self: Any) -> Any:
    bend = lax.tanh(_softplus_of(self))
    return grad_output * (bend + self * _sigmoid(self) * (1 - bend * bend))


@_pointwise("softplus")
def softplus(cx: Context, self: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    scaled = self * beta
    return where(scaled > threshold, self, divide(_softplus_of(scaled), beta))


@_pointwise("softplus_backward")
def softplus_backward(cx: Context, grad_output: Any, self: Any, beta: Any, threshold: Any) -> Any:
    scaled = self * beta
    grown = lax.exp(scaled)
    return where(scaled > threshold, grad_output, grad_output * grown / (grown + 1))


@_pointwise("log_sigmoid_forward")
def log_sigmoid_forward(cx: Context, self: Any) -> Any:
    buffer = lax.exp(-lax.abs(self))
    if cx.out[1].numel != cx.out[0].numel:
        buffer = jnp.zeros(cx.out[1].shape, self.dtype)
    return log_sigmoid(self), buffer


@_pointwise("log_sigmoid_backward")
def log_sigmoid_backward(cx: Context, grad_output: Any, self: Any, buffer: Any) -> Any:
    decay = buffer if buffer.shape == self.shape else lax.exp(-lax.abs(self))
    share = decay / (1 + decay)
    return grad_output * where(self < 0, 1 - share, share)


@rule("logit.default", OpClass.POINTWISE, promote=Promote.INT_TO_FLOAT)
def logit(cx: Context, self: Any, eps: float | None = None) -> Any:
    if eps is not None:
        low = narrow(cx, as_array(eps, self.dtype))
        high = narrow(cx, 1 - low)
        # With eps above 0.5 the bounds have changed places: what is below the first one is not held to the other.
        self = where(self < low, low, where(self > high, high, self))
    # Half precision is rounded at each step here, unlike everywhere else.
    return lax.log(narrow(cx, self / narrow(cx, 1 - self)))


@_pointwise("logit_backward")
def logit_backward(cx: Context, grad_output: Any, self: Any, eps: float | None = None) -> Any:
    unbounded = eps is None or eps < 0  # the line that ATen draws
    low = as_array(0 if unbounded else eps, self.dtype)
    outside = (self < low) | (self > 1 - low)  # NaN is neither in nor out
    return where(outside, np.nan if unbounded else 0, grad_output / (self * (1 - self)))


# The exponential on one side, a line on the other.


@_pointwise("elu")
def elu(cx: Context, self: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    return where(self < 0, lax.expm1(self * input_scale) * (alpha * scale), self * scale)


@_pointwise("elu_backward")
def elu_backward(
    cx: Context, grad_output: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, self_or_result: Any
) -> Any:
    # In this order: the gradient is infinite, and its product with a zero slope NaN, where eager's is.
    x, drop, bent = self_or_result, alpha * scale, grad_output * input_scale
    bent = bent * (x + drop) if is_result else bent * drop * lax.exp(x * input_scale)
    return where(x > 0, grad_output * scale, bent)


@_pointwise("celu")
def celu(cx: Context, self: Any, alpha: Any = 1) -> Any:
    alpha = as_array(alpha, self.dtype)
    return where(self < 0, lax.expm1(self * (1 / alpha)) * alpha, self)


# Straight pieces.


@_pointwise("hardtanh")
def hardtanh(cx: Context, self: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    return at_most(at_least(self, min_val), max_val)


@_pointwise("hardtanh_backward")
def hardtanh_backward(cx: Context, grad_output: Any, self: Any, min_val: Any, max_val: Any) -> Any:
    return where((self > min_val) & (self < max_val), grad_output, 0)


@_pointwise("hardsigmoid_backward")
def hardsigmoid_backward(cx: Context, grad_output: Any, self: Any) -> Any:
    return where((self > -3) & (self < 3), divide(grad_output, 6), 0)


@_pointwise("hardswish_backward")
def hardswish_backward(cx: Context, grad_output: Any, self: Any) -> Any:
    inner = grad_output * (divide(self, 3) + as_array(0.5, self.dtype))
    return where(self <= -3, 0, where(self >= 3, grad_output, inner))


@_pointwise("leaky_relu")
def leaky_relu(cx: Context, self: Any, negative_slope: Any = 0.01) -> Any:
    return where(self > 0, self, self * negative_slope)


@_pointwise("leaky_relu_backward")
def leaky_relu_backward(
    cx: Context, grad_output: Any, self: Any, negative_slope: Any, self_is_result: bool
) -> Any:
    return where(self > 0, grad_output, grad_output * negative_slope)


@_pointwise("rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    cx: Context,
    grad_output: Any,
    self: Any,
    noise: Any,
    lower: Any,
    upper: Any,
    training: bool,
    self_is_result: bool,
) -> Any:
    slope = (lower + upper) * as_array(0.5, self.dtype)
    fixed = where(self > 0, grad_output, grad_output * slope)
    if not training:
        return fixed
    return where(spread(jnp.asarray(upper - lower > 1e-6), self.shape), grad_output * noise, fixed)


@_pointwise("_prelu_kernel")
def prelu(cx: Context, self: Any, weight: Any) -> Any:
    return where(self > 0, self, weight * self)


@_pointwise("_prelu_kernel_backward")
def prelu_backward(cx: Context, grad_output: Any, self: Any, weight: Any) -> Any:
    up = self > 0
    return where(up, grad_output, weight * grad_output), where(up, 0, self * grad_output)


@rule("threshold.default", OpClass.POINTWISE)
def threshold(cx: Context, self: Any, threshold: Any, value: Any) -> Any:
    self, threshold, value = by_tensors((self,), threshold, value)
    return where(self <= threshold, value, self)


@rule("threshold_backward.default", OpClass.POINTWISE)
def threshold_backward(cx: Context, grad_output: Any, self: Any, threshold: Any) -> Any:
    grad_output, self, threshold = by_tensors((grad_output, self), threshold)
    return where(self <= threshold, 0, grad_output)


def _within(cx: Context, x: Any, lambd: Any) -> Any:
    lambd = narrow(cx, lambd)  # what half precision makes of 0.1 is within 0.1
    return (x >= -lambd) & (x <= lambd)


@_pointwise("hardshrink")
def hardshrink(cx: Context, self: Any, lambd: Any = 0.5) -> Any:
    return where(_within(cx, self, lambd), 0, self)


@_pointwise("softshrink")
def softshrink(cx: Context, self: Any, lambd: Any = 0.5) -> Any:
    return where(self > lambd, self - lambd, where(self < -lambd, self + lambd, where(isnan(self), self, 0)))


@_pointwise("hardshrink_backward", "softshrink_backward")
def shrink_backward(cx: Context, grad_output: Any, self: Any, lambd: Any) -> Any:
    return where(_within(cx, self, lambd) | isnan(self), 0, grad_output)


# Gates and dropout.


def _halves(x: Any, dim: int) -> tuple[Any, Any]:
    dim %= x.ndim
    return tuple(jnp.split(x, 2, dim))


@_pointwise("glu")
def glu(cx: Context, self: Any, dim: int = -1) -> Any:
    value, gate = _halves(self, dim)
    return value * _sigmoid(gate)


@_pointwise("glu_backward")
def glu_backward(cx: Context, grad_output: Any, self: Any, dim: int) -> Any:
    value, gate = _halves(self, dim)
    open_ = _sigmoid(gate)
    to_value = grad_output * open_
    return lax.concatenate([to_value, to_value * (1 - open_) * value], dim % self.ndim)


@_pointwise("glu_jvp")
def glu_jvp(cx: Context, glu: Any, x: Any, dx: Any, dim: int) -> Any:
    open_ = _sigmoid(_halves(x, dim)[1])
    d_value, d_gate = _halves(dx, dim)
    return d_value * open_ + glu * (1 - open_) * d_gate


@_pointwise("glu_backward_jvp")
def glu_backward_jvp(
    cx: Context, grad_x: Any, grad_glu: Any, x: Any, dgrad_glu: Any, dx: Any, dim: int
) -> Any:
    value, gate = _halves(x, dim)
    d_value, d_gate = _halves(dx, dim)
    open_ = _sigmoid(gate)
    shut = 1 - open_
    to_value = _halves(grad_x, dim)[0]
    d_to_value = dgrad_glu * open_ + to_value * shut * d_gate
    d_to_gate = d_to_value * shut * value + to_value * shut * (d_value - open_ * d_gate * value)
    return lax.concatenate([d_to_value, d_to_gate], dim % x.ndim)


@rule("native_dropout_backward.default", OpClass.POINTWISE)
def native_dropout_backward(cx: Context, grad_output: Any, mask: Any, scale: float) -> Any:
    # Whole numbers meet the mask before they are rounded: a negative one that is dropped is 0.0, not -0.0.
    grad_output, mask = by_tensors((grad_output, mask))
    kept = grad_output * mask
    dtype = JAX_DTYPE[computation_dtype((kept, scale), {}, Promote.DEFAULT)]
    return cast(kept, dtype) * as_array(scale, dtype)


@rule("_masked_scale.default", OpClass.POINTWISE, promote=Promote.DEFAULT, defines=True)
def masked_scale(cx: Context, self: Any, mask: Any, scale: float) -> Any:
    return self * mask * as_array(scale, self.dtype)
