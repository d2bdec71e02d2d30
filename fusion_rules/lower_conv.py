"""Convolutions, by the form that XLA has for them (`convolution`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .convolution import Native, Window
from .lowering import Context, NoLowering
from .platforms import variants
from .precision import accumulator, conv_precision
from .rule import OpClass, rule

NATIVE = Native(explicit=False)


@variants
def form_of(win: Window) -> Any:
    """The form of a convolution with this geometry."""
    return NATIVE


def run(form: Any, product: str, win: Window, a: jax.Array, b: jax.Array) -> jax.Array:
    """One product of a form. XLA has only real convolutions, so complex ones are made of four."""
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        rr, ii, ri, ir = (run(form, product, win, p, q) for p, q in (
            (a.real, b.real), (a.imag, b.imag), (a.real, b.imag), (a.imag, b.real)))  # fmt: skip
        return lax.complex(rr - ii, ri + ir)
    return getattr(form, product)(win, a, b)


def window(
    size: tuple[int, ...], out: tuple[int, ...], kernel: tuple[int, ...],
    stride: Any, padding: Any, dilation: Any, groups: int,
) -> Window:  # fmt: skip
    """A `Window` from torch's arguments, whose lists may have one entry for all dimensions."""
    rank = len(size)

    def every(values: Any) -> tuple[int, ...]:
        return tuple(values) * rank if len(values) == 1 else tuple(values)

    return Window(tuple(size), tuple(out), tuple(kernel), every(stride), every(padding), every(dilation), groups,
                  conv_precision())  # fmt: skip


def with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The bias of each channel of `[N, C, *size]` added, in the accumulator's dtype."""
    if bias is None:
        return y
    acc = accumulator(y.dtype)
    return y.astype(acc) + bias.astype(acc).reshape(-1, *(1,) * (y.ndim - 2))


def empty(*shapes: tuple[int, ...]) -> bool:
    """Whether one of the tensors has no elements."""
    return any(0 in shape for shape in shapes)


def geometry(input: Any, weight: Any, out: Any, transposed: bool, *how: Any) -> tuple[str, Window]:
    """Which product a convolution from `input` to `out` (anything with a shape) is, and its window.

    A transposed convolution is the input gradient of a plain one: its output takes the place of that one's input.
    """
    big, small = (out, input) if transposed else (input, out)
    return "input_grad" if transposed else "forward", window(big.shape[2:], small.shape[2:], weight.shape[2:], *how)


@rule("convolution.default", OpClass.CONVOLUTION)
def convolution(
    cx: Context, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    out = cx.out[0]
    if empty(input.shape, weight.shape, out.shape):
        return with_bias(jnp.zeros(out.shape, input.dtype), bias)
    product, win = geometry(input, weight, out, transposed, stride, padding, dilation, groups)
    return with_bias(run(form_of(win), product, win, input, weight), bias)


def bias_gradient(grad_output: jax.Array) -> jax.Array:
    """The sum over images and positions, in the accumulator's dtype."""
    return grad_output.astype(accumulator(grad_output.dtype)).sum((0, *range(2, grad_output.ndim)))


@variants
def as_weights_lie(gradient: jax.Array) -> jax.Array:
    """A gradient of weights `[O, I, ...]`, which goes where the weights do: how it lies is the compiler's choice."""
    return gradient


@rule("convolution_backward.default", OpClass.CONVOLUTION)
def convolution_backward(
    cx: Context, grad_output: Any, input: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    if jnp.issubdtype(grad_output.dtype, jnp.complexfloating):
        raise NoLowering("the gradient of a complex convolution")
    none = empty(grad_output.shape, input.shape, weight.shape)
    _, win = geometry(input, weight, grad_output, transposed, stride, padding, dilation, groups)
    big, small = (grad_output, input) if transposed else (input, grad_output)
    product = "forward" if transposed else "input_grad"
    form, results = form_of(win), []
    if output_mask[0]:
        results.append(jnp.zeros_like(input) if none else run(form, product, win, grad_output, weight))
    if output_mask[1]:
        results.append(jnp.zeros_like(weight) if none else as_weights_lie(run(form, "weight_grad", win, big, small)))
    if output_mask[2]:
        results.append(bias_gradient(grad_output))
    return tuple(results)


@variants
def forward(win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
    """A convolution, not transposed, that is all of an op: how its images lie is nobody's business."""
    return run(form_of(win), "forward", win, x, w)


@rule("conv_tbc.default", OpClass.CONVOLUTION)
def conv_tbc(cx: Context, self: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """Time, batch, channel: self `[T, B, C]`, weight `[K, C, O]`."""
    x, w = self.transpose(1, 2, 0), weight.transpose(2, 1, 0)
    out = cx.out[0]
    if empty(x.shape, w.shape, out.shape):
        y = jnp.zeros((out.shape[1], out.shape[2], out.shape[0]), x.dtype)
    else:
        y = forward(window(x.shape[2:], out.shape[:1], w.shape[2:], (1,), (pad,), (1,), 1), x, w)
    return with_bias(y, bias).transpose(2, 0, 1)
