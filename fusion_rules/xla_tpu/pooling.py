"""Maxima of windows, for a TPU: XLA's own op, which reads a window where it lies.

Taken apart into slices, windows that overlap are copied for each dimension: 139 us by the compiler's analysis for 3x3
windows of [16, 64, 32, 32], and 85 so. The maximum and its place are reduced together, and of equal ones the first is
kept whatever the order in which XLA goes through a window. (`select_and_scatter` for the gradients would take a third
of a scatter's time; but it keeps the one that it comes to first, and in which order it goes is not said.)
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import lax

from ..pool_windows import Adaptive, Axis, first_maximum, max_windows


@max_windows.on("tpu")
def by_window(x: jax.Array, axes: tuple[Axis | Adaptive, ...]) -> tuple[jax.Array, jax.Array]:
    """A maximum and its place in one pass over the windows; adaptive ones that differ as everywhere"""
    plain = [a for a in axes if isinstance(a, Axis)]
    lead = x.ndim - len(axes)
    if len(plain) < len(axes) or 0 in x.shape:
        return max_windows.any(x, axes)
    padding = [(0, 0)] * lead + [(a.padding, max(a.high, 0)) for a in plain]
    sizes, strides, dilation = (
        (1,) * lead + tuple(getattr(a, name) for a in plain) for name in ("kernel", "stride", "dilation")
    )
    cells = tuple(a.size for a in plain)
    places = lax.reshape(lax.iota(np.int32, math.prod(cells)), cells)
    index = lax.broadcast_in_dim(places, x.shape, tuple(range(lead, x.ndim)))

    start, pick = first_maximum(x.dtype)
    best, place = lax.reduce_window((x, index), start, pick, sizes, strides, padding, window_dilation=dilation)
    return best, place
