"""Which form a convolution takes on XLA:CPU.

The limits are measured at ResNet, VGG and MobileNet geometries (batch 16 and below).
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from ..convolution import Native, Window
from ..cores import threads
from ..spec import JAX_DTYPE
from .conv_forms import Depthwise, Patches, Pointwise, Split
from .turning import DTYPES
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
    return dtype in DTYPES and tiles >= WINOGRAD_TILES and summed >= WINOGRAD_CHANNELS


def choose(product: str, win: Window, n: int, channels: tuple[int, int], dtype: np.dtype) -> Any:
    """The fastest form for one product of a convolution."""
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
