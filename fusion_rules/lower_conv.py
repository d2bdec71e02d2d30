"""Convolutions: rows, and the choice of form on CPU (`conv_forms` has the forms).

The limits in `choose` are measured on XLA:CPU at ResNet, VGG and MobileNet geometries (batch 16 and below).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from . import turning
from .conv_forms import Depthwise, Native, Patches, Pointwise, Split, Window
from .cores import threads
from .lowering import Context, NoLowering
from .precision import accumulator, conv_precision
from .rule import OpClass, rule
from .spec import JAX_DTYPE, Spec
from .winograd import KERNEL, RESULTS, Winograd

# Patches of up to this many bytes stay in cache and beat XLA:CPU's convolution where images are small or thin. For
# bfloat16 the matrix product is so much faster that more, and any image of some depth, are worth it. So are more for
# small images: their weights, which convolutions turn and patches do not, are large (512 channels of 4x4: 4.5 MB).
PATCH_BYTES = 4 << 20
PATCH_BYTES_SMALL = 6 << 20
PATCH_BYTES_HALF = 8 << 20
SMALL_IMAGE = 32
THIN = 16
# Above this, patches cost more memory than groups cost calls.
GROUPED_BYTES = 64 << 20
# Winograd's form combines inputs and products, which takes the time that it saves where few channels are summed (the
# harmonic mean of those of inputs and results), and weights, for which there are to be so many tiles.
WINOGRAD_CHANNELS = 40
WINOGRAD_TILES = 128
# From so many positions per image a batch of products beats one product over transposed operands.
POINTWISE_POSITIONS = 128


def _fits(product: str, win: Window, channels: int, dtype: np.dtype, size: int) -> bool:
    """Whether patches of `size` bytes beat XLA:CPU's own convolution."""
    if any(r > n for r, n in zip(win.reach, win.out if product == "input_grad" else win.size, strict=True)):
        return size <= GROUPED_BYTES
    small, thin = math.prod(win.out) <= SMALL_IMAGE, channels < THIN
    if dtype == JAX_DTYPE[torch.bfloat16]:
        return size <= PATCH_BYTES_HALF and (product == "input_grad" or not thin)
    gains = {"forward": thin and channels > 1, "input_grad": thin, "weight_grad": False}
    return size <= (PATCH_BYTES_SMALL if small else PATCH_BYTES if gains[product] else 0)


def _is_winograd(product: str, win: Window, n: int, channels: tuple[int, int], dtype: np.dtype) -> bool:
    """Whether a product is one of those that Winograd's form has, and large enough to gain by it."""
    if win.kernel != (KERNEL, KERNEL) or {*win.stride, *win.dilation, win.groups} != {1}:
        return False
    size = win.size if product == "input_grad" else win.out
    tiles = n * math.prod(-(-s // RESULTS) for s in size)
    summed = 2 * math.prod(channels) / sum(channels)
    return dtype in turning.DTYPES and tiles >= WINOGRAD_TILES and summed >= WINOGRAD_CHANNELS


def choose(
    product: str, win: Window, n: int, channels: tuple[int, int], dtype: np.dtype, device: torch.device
) -> Any:
    """The form for one product of a convolution: `n` images of `dtype`, from and to so many `channels`."""
    if device.type != "cpu":
        return Native(explicit=False)
    dtype = np.zeros((), dtype).real.dtype
    size = n * channels[0] * win.taps * math.prod(win.out) * dtype.itemsize
    if channels[0] == win.groups > 1 and win.taps <= 64:
        return Depthwise()
    if win.taps == 1:
        many = win.groups == 1 and math.prod(win.out) >= POINTWISE_POSITIONS
        return Pointwise() if many else Patches()
    if not jnp.issubdtype(dtype, jnp.inexact) or (win.groups > 1 and size <= GROUPED_BYTES):
        return Patches()
    if win.groups > 1:
        return Split(Native(explicit=True))
    if threads() == 1 and _is_winograd(product, win, n, channels, dtype):
        return Winograd()  # with more of them XLA shares out its convolution, but no loop inside of another
    return Patches() if _fits(product, win, channels[0], dtype, size) else Native(explicit=True)


def _is_by_pixels(form: Any, device: torch.device) -> bool:
    """Whether images lie by pixels in what runs a product."""
    return device.type == "cpu" and isinstance(form, (Native, Winograd))


def _run(form: Any, product: str, win: Window, a: jax.Array, b: jax.Array, device: torch.device) -> jax.Array:
    """One product. XLA has only real convolutions, so complex ones are made of four."""
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        rr, ii, ri, ir = (_run(form, product, win, p, q, device) for p, q in (
            (a.real, b.real), (a.imag, b.imag), (a.real, b.imag), (a.imag, b.real)))  # fmt: skip
        return lax.complex(rr - ii, ri + ir)
    if isinstance(form, (Native, Split)) and device.type == "cpu":
        # XLA:CPU converts bfloat16 itself and would sum float16 products in float16.
        a, b = a.astype(accumulator(a.dtype)), b.astype(accumulator(b.dtype))
    return getattr(form, product)(win, a, b)


def window(
    size: tuple[int, ...], out: tuple[int, ...], kernel: tuple[int, ...],
    stride: Any, padding: Any, dilation: Any, groups: int, spec: Spec,
) -> Window:  # fmt: skip
    """A `Window` from torch's arguments, whose lists may have one entry for all dimensions."""
    rank = len(size)

    def every(values: Any) -> tuple[int, ...]:
        return tuple(values) * rank if len(values) == 1 else tuple(values)

    return Window(tuple(size), tuple(out), tuple(kernel), every(stride), every(padding), every(dilation), groups,
                  conv_precision(spec))  # fmt: skip


@rule("convolution.default", OpClass.CONVOLUTION)
def convolution(
    cx: Context, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    spec = cx.out[0]
    acc = accumulator(spec.dtype)
    by_pixels = False
    if 0 in (*input.shape, *weight.shape, *spec.shape):
        y = jnp.zeros(spec.shape, acc)
    else:
        product = "input_grad" if transposed else "forward"
        big, small = (spec.shape, input.shape) if transposed else (input.shape, spec.shape)
        win = window(big[2:], small[2:], weight.shape[2:], stride, padding, dilation, groups, spec)
        form = choose(product, win, input.shape[0], (big[1], small[1]), input.dtype, spec.device)
        by_pixels = _is_by_pixels(form, spec.device)
        if by_pixels:
            is_turned = any(input is each for each in cx.places.by_planes)
            input = turning.by_pixels(input) if is_turned else turning.left_by_pixels(input)
        y = _run(form, product, win, input, weight, spec.device)
    y = y if bias is None else y.astype(acc) + bias.astype(acc).reshape(-1, *(1,) * (input.ndim - 2))
    if not by_pixels:
        return y
    return turning.by_planes(y) if cx.places.is_kept else turning.left_by_pixels(y)


@rule("convolution_backward.default", OpClass.CONVOLUTION)
def convolution_backward(
    cx: Context, grad_output: Any, input: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    if jnp.issubdtype(grad_output.dtype, jnp.complexfloating):
        raise NoLowering("the gradient of a complex convolution")
    spec = cx.out[0]
    empty = 0 in (*grad_output.shape, *input.shape, *weight.shape)
    # A transposed convolution is the input gradient of a plain one: its output takes the place of that one's input.
    big, small = (grad_output, input) if transposed else (input, grad_output)
    win = window(big.shape[2:], small.shape[2:], weight.shape[2:], stride, padding, dilation, groups, spec)
    product = "forward" if transposed else "input_grad"
    products = [p for p, wanted in zip((product, "weight_grad"), output_mask, strict=False) if wanted and not empty]
    channels = big.shape[1], small.shape[1]
    forms = {p: choose(p, win, big.shape[0], channels, big.dtype, spec.device) for p in products}
    if any(_is_by_pixels(form, spec.device) for form in forms.values()):
        # Each product would turn what makes a gradient, once more and element by element.
        grad_output = turning.by_pixels(grad_output)
    if isinstance(forms.get("weight_grad"), Winograd):
        input = turning.by_pixels(input)  # it is given by planes; XLA would turn it twice on the way to a loop
    big, small = (grad_output, input) if transposed else (input, grad_output)
    results = []
    if output_mask[0]:
        zeros = jnp.zeros_like(input)
        made = zeros if empty else _run(forms[product], product, win, grad_output, weight, spec.device)
        results.append(turning.by_planes(made) if _is_by_pixels(forms.get(product), spec.device) else made)
    if output_mask[1]:
        zeros = jnp.zeros_like(weight)
        results.append(zeros if empty else _run(forms["weight_grad"], "weight_grad", win, big, small, spec.device))
    if output_mask[2]:
        acc = accumulator(grad_output.dtype)
        results.append(grad_output.astype(acc).sum((0, *range(2, grad_output.ndim))))
    return tuple(results)


@rule("conv_tbc.default", OpClass.CONVOLUTION)
def conv_tbc(cx: Context, self: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """Time, batch, channel: self `[T, B, C]`, weight `[K, C, O]`."""
    x, w = self.transpose(1, 2, 0), weight.transpose(2, 1, 0)
    spec = cx.out[0]
    acc = accumulator(spec.dtype)
    if 0 in (*x.shape, *w.shape, *spec.shape):
        return jnp.zeros(spec.shape, acc) + bias.astype(acc)
    win = window(x.shape[2:], spec.shape[:1], w.shape[2:], (1,), (pad,), (1,), 1, spec)
    form = choose("forward", win, x.shape[0], (x.shape[1], w.shape[0]), x.dtype, spec.device)
    y = _run(form, "forward", win, x, w, spec.device)
    return y.transpose(2, 0, 1).astype(acc) + bias.astype(acc)
