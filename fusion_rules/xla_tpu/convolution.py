"""Convolutions for a TPU: gradients lie as the weights do, and patches that touch nowhere are products.

XLA:TPU keeps weights `[O, I, H, W]` by rows of inputs where these fill whole lanes, and computes their gradient by rows
of outputs. An optimizer's step then went over the gradient's order, and weights and momentum were copied into it and
out of it: SGD with 512 x 512 x 3 x 3 weights took 269 thousand cycles by the compiler's count, 150 in the weights'.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout

from ..convolution import Window
from ..lower_conv import NATIVE, as_weights_lie, form_of
from .kernels import LANES


@as_weights_lie.on("tpu")
def by_inputs(gradient: jax.Array) -> jax.Array:
    """Rows of inputs, where a device keeps weights so"""
    inputs, *window = gradient.shape[1:]
    # Before jax 0.7 layouts have other names.
    if inputs % LANES or max(window) == 1 or not hasattr(layout, "Format"):
        return gradient
    order = layout.Layout((*range(2, gradient.ndim), 0, 1))
    pinned: jax.Array = layout.with_layout_constraint(gradient, order)
    return pinned


class Patches:
    """Windows beside each other, as a vision transformer looks at its images: one product over what a window sees.

    XLA:TPU keeps them convolutions. By its count of cycles the weights' gradient of 16 x 16 patches (512 of them from
    16 images of 112 x 112) took 330 thousand of ViT's step, whose gradient comes by tokens, and takes 16; the images'
    gradient 1955 thousand, and 180.
    """

    def forward(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        out, kernel = _letters(win)
        return _product(win, f"nc{_both(win)},mc{kernel}->nm{out}", _cut(win, x), w)

    def input_grad(self, win: Window, y: jax.Array, w: jax.Array) -> jax.Array:
        out, kernel = _letters(win)
        cut = _product(win, f"nm{out},mc{kernel}->nc{_both(win)}", y, w)
        return cut.reshape(*cut.shape[:2], *win.size)

    def weight_grad(self, win: Window, x: jax.Array, y: jax.Array) -> jax.Array:
        out, kernel = _letters(win)
        return _product(win, f"nc{_both(win)},nm{out}->mc{kernel}", _cut(win, x), y)


def _letters(win: Window) -> tuple[str, str]:
    return "uvw"[: win.rank], "xyz"[: win.rank]


def _both(win: Window) -> str:
    return "".join(o + k for o, k in zip(*_letters(win), strict=True))


def _cut(win: Window, x: jax.Array) -> jax.Array:
    """`[N, C, *size]` with each dimension in two: which window, and where in it."""
    return x.reshape(*x.shape[:2], *(n for pair in zip(win.out, win.kernel, strict=True) for n in pair))


def _product(win: Window, how: str, a: jax.Array, b: jax.Array) -> jax.Array:
    found: jax.Array = jnp.einsum(how, a, b, precision=win.precision)
    return found


PATCHES = Patches()


@form_of.on("tpu")
def patches_or_native(win: Window) -> Any:
    """Products, where windows neither overlap nor leave anything out"""
    tiles = all(o * k == n for o, k, n in zip(win.out, win.kernel, win.size, strict=True))
    touch = win.kernel == win.stride and max(win.padding) == 0 and max(win.dilation) == 1
    return PATCHES if tiles and touch and win.groups == 1 and win.taps > 1 else NATIVE
