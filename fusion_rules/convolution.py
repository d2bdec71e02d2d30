"""Convolution: its geometry, and the form that XLA itself has for it.

A form is three bilinear products over one `Window`: `forward(x, w)`, `input_grad(y, w)` and `weight_grad(x, y)`.
Layouts are torch's: x `[N, C, *size]`, w `[O, C / groups, *kernel]`, y `[N, O, *out]`. A transposed convolution is
`input_grad` with the roles of x and y exchanged. All forms return the accumulator's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax


@dataclass(frozen=True, slots=True)
class Window:
    """The static geometry of one convolution; every tuple has one entry per spatial dimension."""

    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    precision: lax.Precision

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """How far one window reaches: the extent of the dilated kernel."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def overhang(self) -> tuple[int, ...]:
        """Right padding, negative where the last window ends before the input does."""
        needed = zip(self.out, self.stride, self.reach, strict=True)
        return tuple((o - 1) * s + r - n - p for (o, s, r), n, p in zip(needed, self.size, self.padding, strict=True))

    def offsets(self) -> list[tuple[int, ...]]:
        """Where each tap of the kernel lies inside a window, in row-major order of the kernel."""
        return [tuple(int(i) * d for i, d in zip(at, self.dilation, strict=True)) for at in np.ndindex(*self.kernel)]


def pad_spatial(
    x: jax.Array, low: tuple[int, ...], high: tuple[int, ...], step: tuple[int, ...] | None = None
) -> jax.Array:
    """Zeros around (negative: cut off) and, with `step`, between the elements of the trailing dimensions."""
    inner = step or (1,) * len(low)
    config = [(0, 0, 0)] * (x.ndim - len(low)) + [(a, b, s - 1) for a, b, s in zip(low, high, inner, strict=True)]
    return x if not any(map(any, config)) else lax.pad(x, np.zeros((), x.dtype), config)


def cut(x: jax.Array, start: tuple[int, ...], count: tuple[int, ...], step: tuple[int, ...]) -> jax.Array:
    """`count` elements from `start` by `step` of each trailing dimension."""
    front = x.ndim - len(start)
    stop = tuple(a + (c - 1) * s + 1 for a, c, s in zip(start, count, step, strict=True))
    return lax.slice(x, (0,) * front + start, x.shape[:front] + stop, (1,) * front + step)


def spread(win: Window, y: jax.Array) -> jax.Array:
    """y with the zeros between its elements that a stride leaves, and around it, so that windows of the flipped
    kernel at stride 1 give the input's gradient."""
    low = tuple(r - 1 - p for r, p in zip(win.reach, win.padding, strict=True))
    spans = zip(win.size, win.padding, win.out, win.stride, strict=True)
    high = tuple(n + p - (o - 1) * s - 1 for n, p, o, s in spans)
    return pad_spatial(y, low, high, win.stride)


class Native:
    """`lax.conv_general_dilated`. `explicit` pads beforehand, which XLA:CPU needs where a kernel exceeds its input."""

    def __init__(self, explicit: bool):
        self.explicit = explicit

    def _conv(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        names = ("NC", "OI", "NC")
        spatial = "DHW"[3 - win.rank :]
        padding = list(zip(win.padding, win.overhang, strict=True))
        if self.explicit and any(r > n for r, n in zip(win.reach, win.size, strict=True)):
            x = pad_spatial(x, win.padding, win.overhang)
            padding = [(0, 0)] * win.rank
        return lax.conv_general_dilated(
            x, w, win.stride, padding, rhs_dilation=win.dilation, feature_group_count=win.groups,
            dimension_numbers=tuple(n + spatial for n in names), precision=win.precision,
        )  # fmt: skip

    def forward(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        return self._conv(win, x, w)

    def input_grad(self, win: Window, y: jax.Array, w: jax.Array) -> jax.Array:
        if self.explicit and win.groups == 1 and any(r > n for r, n in zip(win.reach, win.out, strict=True)):
            flipped = lax.rev(w, tuple(range(2, w.ndim))).swapaxes(0, 1)
            wide = spread(win, y)
            one, none = (1,) * win.rank, (0,) * win.rank
            inner = Window(wide.shape[2:], win.size, win.kernel, one, none, win.dilation, 1, win.precision)
            return self._conv(inner, wide, flipped)
        x = jax.ShapeDtypeStruct((y.shape[0], w.shape[1] * win.groups, *win.size), y.dtype)
        return jax.linear_transpose(lambda v: self._conv(win, v, w), x)(y)[0]

    def weight_grad(self, win: Window, x: jax.Array, y: jax.Array) -> jax.Array:
        spans = [(o - 1) * s + 1 for o, s in zip(win.out, win.stride, strict=True)]
        if self.explicit and any(s > n for s, n in zip(spans, win.size, strict=True)):
            x = pad_spatial(x, win.padding, win.overhang)
            win = Window(x.shape[2:], win.out, win.kernel, win.stride, (0,) * win.rank, win.dilation, win.groups,
                         win.precision)  # fmt: skip
        w = jax.ShapeDtypeStruct((y.shape[1], x.shape[1] // win.groups, *win.kernel), y.dtype)
        return jax.linear_transpose(lambda v: self._conv(win, x, v), w)(y)[0]
