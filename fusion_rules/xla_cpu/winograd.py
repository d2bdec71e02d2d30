"""Convolutions of 3x3 windows in 16 products for four results instead of 36: Winograd's F(2x2, 3x3).

After Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv:1509.09308), whose names these are: a
tile of 4x4 inputs d and a kernel g give 2x2 results `A^T [(G g G^T) * (B^T d B)] A`. Summed over the channels, the
element-wise product is one matrix product for each of the 16 elements of a tile. Both gradients are convolutions of
this kind, too; that of the weights is `G^T [(A y A^T) * (B^T d B)] G`, summed over the tiles.

Rounding is nearly that of a sum over a window: what is combined is multiplied by ones and halves. But the results of a
tile share it, and so what is not finite: one infinity would make a NaN of a result whose own window does not see it,
and sums of huge numbers overflow. So where anything that is not finite comes out, XLA convolves all of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..convolution import Window, pad_spatial
from . import turning
from .steps import BLOCK, largest_divisor

Edges = Sequence[tuple[int, int]]  # zeros before and after the rows, and the columns
Combine = Callable[..., Sequence[jax.Array]]  # of the elements of a row or column of tiles, or of kernels
KERNEL, TILE, RESULTS = 3, 4, 2
ELEMENTS = TILE * TILE
NATIVE = ("NHWC", "HWIO", "NHWC")  # what XLA:CPU has a convolution for
# Combined inputs and their products of one step: they stay near, and are memory that is used again.
STEP_BYTES = 2 << 20
# Weights are few: a product with this is less to compile than its sums, and as quick.
G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
G_BOTH_WAYS = np.kron(G, G)  # [elements of a tile, elements of a kernel]


def _inputs(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> Sequence[jax.Array]:
    """B^T, on four inputs."""
    return a - c, b + c, c - b, b - d


def _results(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> Sequence[jax.Array]:
    """A^T, on four products."""
    return a + b + c, b - c - d


def _gradients(a: jax.Array, b: jax.Array) -> Sequence[jax.Array]:
    """A, on two gradients of results."""
    return a, a + b, a - b, -b


def _weights(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> Sequence[jax.Array]:
    """G^T, on four sums."""
    middle = (b + c) * 0.5
    return a + middle, (b - c) * 0.5, middle + d


def _combined(f: Combine, x: jax.Array, row: int, column: int) -> jax.Array:
    """`f` on what lies in the rows of tiles, the first dimension of x, then in their columns, the second. In the result
    they are dimensions `row` and `column`.

    One way after the other: the elements by themselves are as many loops, of which XLA compiles and keeps each.
    """
    return jnp.stack(f(*jnp.stack(f(*x), row + 1)), column)


def _is_finite(x: jax.Array) -> jax.Array:
    """Whether a sum of all is finite: if anything is not, it is not. By a product down to what XLA reduces in one
    loop, which is quick to run and compile."""
    width = largest_divisor(x.size, BLOCK)
    rows = x.reshape(x.size // width, width)
    return jnp.isfinite((jnp.ones(rows.shape[0], x.dtype) @ rows).sum())


def _if_finite(x: jax.Array, otherwise: Callable[[], jax.Array]) -> jax.Array:
    """`x` if all of it is finite. A loop, because a condition would copy it."""
    return lax.while_loop(lambda s: s[1], lambda s: (otherwise(), jnp.array(False)), (x, ~_is_finite(x)))[0]


def _edges(low: Sequence[int], size: Sequence[int], given: Sequence[int]) -> Edges:
    """The zeros around images of `given` rows and columns whose windows begin `low` before them and are `size`."""
    return [(p, s + KERNEL - 1 - g - p) for p, s, g in zip(low, size, given, strict=True)]


def _pad(x: jax.Array, edges: Edges) -> jax.Array:
    """Zeros around the rows and columns of `[N, H, W, C]`; negative: cut off."""
    low, high = zip(*edges, (0, 0), strict=True)
    return pad_spatial(x, low, high)


@dataclass(frozen=True, slots=True)
class Steps:
    """How `count` images of `tall` rows of `wide` tiles are worked on: `k` images, and `r` of their rows, at a time."""

    count: int
    tall: int
    wide: int
    k: int
    r: int

    @classmethod
    def of(cls, count: int, size: tuple[int, ...], row: int, most: int, least: int = 1) -> Steps:
        """For results of `size`: up to `most` bytes at a time, with `row` in a row of pixels, and `least` steps."""
        tall, wide = (-(-s // RESULTS) for s in size)
        row *= ELEMENTS * wide
        most = min(most, count * tall * row // least)
        if tall * row > most:
            return cls(count, tall, wide, 1, largest_divisor(tall, most // row))
        return cls(count, tall, wide, largest_divisor(count, most // (tall * row)), tall)

    @property
    def size(self) -> tuple[int, int]:
        """Of what comes of all the tiles, which may be a row or column more than there are results."""
        return RESULTS * self.tall, RESULTS * self.wide

    def padded(self, x: jax.Array, low: Sequence[int]) -> tuple[jax.Array, Edges]:
        """Images `[N, H, W, C]` whose windows begin `low` before them, and the zeros that each part of them lacks."""
        rows, columns = _edges(low, self.size, x.shape[1:3])
        return (x, [rows, columns]) if self.r == self.tall else (_pad(x, [rows, (0, 0)]), [(0, 0), columns])

    def part(self, x: jax.Array, i: jax.Array, beyond: int = 0) -> jax.Array:
        """What step `i` works on of images `[N, H, W, C]`, with rows `beyond` its own."""
        return lax.dynamic_slice(x, self.first(i), (self.k, RESULTS * self.r + beyond, *x.shape[2:]))

    def first(self, i: jax.Array) -> tuple[Any, ...]:
        """Where step `i` begins in images `[N, H, W, C]`."""
        i, parts = turning.unsigned(i), self.tall // self.r
        none = np.zeros((), i.dtype)
        return i // parts * self.k, i % parts * (RESULTS * self.r), none, none

    def inputs(self, images: jax.Array, edges: Edges, i: jax.Array) -> jax.Array:
        """B^T d B of step `i`: `[elements, tiles, C]`. Tiles begin at every other pixel."""
        x = _pad(self.part(images, i, KERNEL - 1 - sum(edges[0])), edges)
        for axis, count, to in ((1, self.r, 0), (3, self.wide, 1)):
            ends = [(first, first + RESULTS * count - 1) for first in range(TILE)]
            x = jnp.stack(_inputs(*(lax.slice_in_dim(x, *each, RESULTS, axis) for each in ends)), to)
        return x.reshape(ELEMENTS, -1, images.shape[3])

    def gradients(self, grads: jax.Array, i: jax.Array) -> jax.Array:
        """A y A^T of step `i`: `[elements, O, tiles]`."""
        part = self.part(grads, i).reshape(self.k, self.r, RESULTS, self.wide, RESULTS, -1)
        places = part.transpose(2, 4, 0, 1, 3, 5).reshape(-1, grads.shape[3])
        turned = turning.transposed(places, RESULTS * RESULTS).reshape(RESULTS, RESULTS, grads.shape[3], -1)
        return _combined(_gradients, turned, 0, 1).reshape(ELEMENTS, grads.shape[3], -1)

    def loop(self, step: Callable[[jax.Array, jax.Array], jax.Array], begin: jax.Array) -> jax.Array:
        """`step(i, value)` for each step in turn, from `begin` on."""
        return lax.fori_loop(0, self.count // self.k * (self.tall // self.r), step, begin)


class Winograd:
    """A form (see `conv_forms`) for 3x3 kernels at stride 1 without dilation or groups, on real images."""

    def forward(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        return self._convolve(win, x, w, False, win.padding, win.out)

    def input_grad(self, win: Window, y: jax.Array, w: jax.Array) -> jax.Array:
        return self._convolve(win, y, w, True, [KERNEL - 1 - p for p in win.padding], win.size)

    def _convolve(
        self, win: Window, x: jax.Array, w: jax.Array, back: bool, low: Sequence[int], size: tuple[int, ...]
    ) -> jax.Array:
        """Windows over x `[N, C, *]` that begin `low` before it, to `[N, O, *size]`; `back`: the kernels are turned
        around and have C first."""
        over = 1 - back
        x = turning.in_pixels(x)
        n, channels, features = x.shape[0], x.shape[3], w.shape[back]
        # Not all at once: what computes x would be computed anew for each place of a tile, if it were not for a loop.
        steps = Steps.of(n, size, (channels + features) * x.dtype.itemsize, STEP_BYTES, least=2)
        images, edges = steps.padded(x, low)
        g = (G_BOTH_WAYS[:, ::-1] if back else G_BOTH_WAYS).astype(x.dtype)
        # Either of two that are equal, as x says: or else the weights of all layers would wait from the beginning on.
        g = lax.dynamic_index_in_dim(np.stack([g, g]), (x[0, 0, 0, 0] > 0).astype(np.int32), keepdims=False)
        weights = lax.dot_general(g, w.reshape(-1, KERNEL * KERNEL), (((1,), (1,)), ((), ())), win.precision)
        weights = weights.reshape(ELEMENTS, *w.shape[:2])

        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            inputs = steps.inputs(images, edges, i)
            products = lax.dot_general(inputs, weights, (((2,), (1 + over,)), ((0,), (0,))), win.precision)
            products = products.reshape(TILE, TILE, steps.k, steps.r, steps.wide, features)
            part = _combined(_results, products, 2, 4).reshape(steps.k, -1, *y.shape[2:])
            return lax.dynamic_update_slice(y, part, steps.first(i))

        def otherwise() -> jax.Array:
            ends = _edges(low, size, x.shape[1:3])
            kernels = (lax.rev(w, (2, 3)) if back else w).transpose(2, 3, over, back)
            return lax.conv_general_dilated(x, kernels, (1, 1), ends, dimension_numbers=NATIVE, precision=win.precision)

        # It begins with anything that comes from x: memory for zeros would be taken when the region begins.
        y = steps.loop(step, jnp.full((n, *steps.size, features), x[0, 0, 0, 0]))
        return turning.in_planes(_if_finite(y[:, : size[0], : size[1]], otherwise))

    def weight_grad(self, win: Window, x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = turning.in_pixels(x), turning.in_pixels(y)
        channels, features = x.shape[3], y.shape[3]
        # Each step adds products of this size, so it had better compute as much.
        added = ELEMENTS * channels * features * x.dtype.itemsize
        steps = Steps.of(x.shape[0], win.out, (channels + features) * x.dtype.itemsize, max(STEP_BYTES, added))
        images, edges = steps.padded(x, win.padding)
        grads = _pad(y, [(0, made - o) for made, o in zip(steps.size, win.out, strict=True)])

        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            inputs, outputs = steps.inputs(images, edges, i), steps.gradients(grads, i)
            return total + lax.dot_general(outputs, inputs, (((2,), (1,)), ((0,), (0,))), win.precision)

        def otherwise() -> jax.Array:
            # The images of a channel are a batch, the gradients kernels, and what they are summed over is the images.
            ends = _edges(win.padding, win.out, win.size)
            a, b = x.transpose(3, 1, 2, 0), y.transpose(1, 2, 0, 3)
            w = lax.conv_general_dilated(a, b, (1, 1), ends, dimension_numbers=NATIVE, precision=win.precision)
            return w.transpose(3, 0, 1, 2)

        total = steps.loop(step, jnp.zeros((ELEMENTS, features, channels), x.dtype))
        total = total.reshape(TILE, TILE, features, channels)
        return _if_finite(_combined(_weights, total, 2, 3), otherwise)
