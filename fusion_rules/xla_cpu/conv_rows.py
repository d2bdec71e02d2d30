"""The rows of convolutions on XLA:CPU: each in the form that is fastest there, on images that lie as it wants them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import lower_conv
from ..convolution import Native, Window
from ..lower_conv import bias_gradient, empty, geometry, with_bias
from ..lowering import Context, NoLowering
from ..precision import accumulator
from ..rule import OpClass, rule
from . import turning
from .conv_choice import choose
from .conv_forms import Split
from .winograd import Winograd


def _is_by_pixels(form: Any) -> bool:
    """Whether images lie by pixels in what runs a product."""
    return isinstance(form, (Native, Winograd))


def _run(form: Any, product: str, win: Window, a: jax.Array, b: jax.Array) -> jax.Array:
    """One product. XLA:CPU converts bfloat16 itself and would sum float16 products in float16."""
    if isinstance(form, (Native, Split)):
        a, b = a.astype(accumulator(a.dtype)), b.astype(accumulator(b.dtype))
    return lower_conv.run(form, product, win, a, b)


@lower_conv.forward.on("cpu")
def forward(win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
    """In the form of several that is fastest for the geometry."""
    return _run(choose("forward", win, x.shape[0], (x.shape[1], w.shape[0]), x.dtype), "forward", win, x, w)


@rule("convolution.default", OpClass.CONVOLUTION, platform="cpu")
def convolution(
    cx: Context, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """The form of several that is fastest for the geometry (`xla_cpu.conv_choice`), on images that lie by pixels."""
    out = cx.out[0]
    if empty(input.shape, weight.shape, out.shape):
        return with_bias(jnp.zeros(out.shape, accumulator(out.dtype)), bias)
    product, win = geometry(input, weight, out, transposed, stride, padding, dilation, groups)
    channels = (out.shape[1], input.shape[1]) if transposed else (input.shape[1], out.shape[1])
    form = choose(product, win, input.shape[0], channels, input.dtype)
    if not _is_by_pixels(form):
        return with_bias(_run(form, product, win, input, weight), bias)
    is_turned = any(input is each for each in cx.places.by_planes)
    input = turning.by_pixels(input) if is_turned else turning.left_by_pixels(input)
    y = with_bias(_run(form, product, win, input, weight), bias)
    return turning.by_planes(y) if cx.places.is_kept else turning.left_by_pixels(y)


@rule("convolution_backward.default", OpClass.CONVOLUTION, platform="cpu")
def convolution_backward(
    cx: Context, grad_output: Any, input: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    """For each gradient the form of several that is fastest for the geometry."""
    if jnp.issubdtype(grad_output.dtype, jnp.complexfloating):
        raise NoLowering("the gradient of a complex convolution")
    none = empty(grad_output.shape, input.shape, weight.shape)
    big, small = (grad_output, input) if transposed else (input, grad_output)
    _, win = geometry(input, weight, grad_output, transposed, stride, padding, dilation, groups)
    product = "forward" if transposed else "input_grad"
    products = [p for p, wanted in zip((product, "weight_grad"), output_mask, strict=False) if wanted and not none]
    channels = big.shape[1], small.shape[1]
    forms = {p: choose(p, win, big.shape[0], channels, big.dtype) for p in products}
    if any(map(_is_by_pixels, forms.values())):
        # Each product would turn what makes a gradient, once more and element by element.
        grad_output = turning.by_pixels(grad_output)
    if isinstance(forms.get("weight_grad"), Winograd):
        input = turning.by_pixels(input)  # it is given by planes; XLA would turn it twice on the way to a loop
    big, small = (grad_output, input) if transposed else (input, grad_output)
    results = []
    if output_mask[0]:
        made = jnp.zeros_like(input) if none else _run(forms[product], product, win, grad_output, weight)
        results.append(turning.by_planes(made) if _is_by_pixels(forms.get(product)) else made)
    if output_mask[1]:
        made = jnp.zeros_like(weight) if none else _run(forms["weight_grad"], "weight_grad", win, big, small)
        results.append(made)
    if output_mask[2]:
        results.append(bias_gradient(grad_output))
    return tuple(results)
