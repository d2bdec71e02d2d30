"""Convolution in several forms, because XLA:CPU's own is fast for some geometries and falls off a cliff for others.

Forms are described in `convolution`, which has XLA's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..convolution import Native, Window, cut, pad_spatial, spread
from ..lower_matmul import product
from ..precision import accumulator


class Split:
    """Groups one by one through another form: XLA:CPU has no fast grouped convolution."""

    def __init__(self, form: Native):
        self.form = form

    def _each(
        self, win: Window, product: str, a: jax.Array, axis_a: int, b: jax.Array, axis_b: int, axis: int
    ) -> jax.Array:
        alone = Window(win.size, win.out, win.kernel, win.stride, win.padding, win.dilation, 1, win.precision)
        run = getattr(self.form, product)
        pairs = zip(jnp.split(a, win.groups, axis_a), jnp.split(b, win.groups, axis_b), strict=True)
        return jnp.concatenate([run(alone, p, q) for p, q in pairs], axis)

    def forward(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        return self._each(win, "forward", x, 1, w, 0, 1)

    def input_grad(self, win: Window, y: jax.Array, w: jax.Array) -> jax.Array:
        return self._each(win, "input_grad", y, 1, w, 0, 1)

    def weight_grad(self, win: Window, x: jax.Array, y: jax.Array) -> jax.Array:
        return self._each(win, "weight_grad", x, 1, y, 1, 0)


# More slices than this per window, and gathering one spatial dimension after the other compiles faster.
MOST_SLICES = 49


class Patches:
    """Windows laid out as a matrix, then one matrix product with the weight as it lies in memory: `[O, C * taps]`."""

    def _windows(self, win: Window, x: jax.Array) -> jax.Array:
        """`[groups, C / groups * taps, N * out]`."""
        x = pad_spatial(x.swapaxes(0, 1), win.padding, tuple(max(h, 0) for h in win.overhang))
        c = x.shape[0]
        if win.taps <= MOST_SLICES:
            stacked = jnp.stack([cut(x, at, win.out, win.stride) for at in win.offsets()], 1)
        else:
            stacked = x
            for i in range(win.rank):
                start = np.arange(win.kernel[i])[:, None] * win.dilation[i]
                at = start + np.arange(win.out[i])[None, :] * win.stride[i]
                # Axes so far: C, the i kernel axes already made, N, out..., and what is left of the input.
                axis = 2 + 2 * i
                stacked = jnp.moveaxis(jnp.take(stacked, jnp.asarray(at), axis=axis, mode="clip"), axis, 1 + i)
        return stacked.reshape(win.groups, c // win.groups * win.taps, -1)

    def _grouped(self, win: Window, y: jax.Array) -> jax.Array:
        """`[groups, O / groups, N * out]`."""
        return y.swapaxes(0, 1).reshape(win.groups, y.shape[1] // win.groups, -1)

    def _dot(self, win: Window, a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
        if win.groups == 1:
            # XLA:CPU multiplies matrices faster than batches of one matrix.
            dims = ((over[0] - 1,), (over[1] - 1,)), ((), ())
            return product(a[0], b[0], dims, precision=win.precision)[None]
        return product(a, b, (((over[0],), (over[1],)), ((0,), (0,))), precision=win.precision)

    def forward(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        n, o = x.shape[0], w.shape[0]
        y = self._dot(win, w.reshape(win.groups, o // win.groups, -1), self._windows(win, x), (2, 1))
        return y.reshape(o, n, *win.out).swapaxes(0, 1)

    def weight_grad(self, win: Window, x: jax.Array, y: jax.Array) -> jax.Array:
        w = self._dot(win, self._grouped(win, y), self._windows(win, x), (2, 2))
        return w.reshape(y.shape[1], x.shape[1] // win.groups, *win.kernel)

    def input_grad(self, win: Window, y: jax.Array, w: jax.Array) -> jax.Array:
        n, g, c, o = y.shape[0], win.groups, w.shape[1], w.shape[0] // win.groups
        spatial = tuple(range(3, 3 + win.rank))
        rows = y.reshape(n, g, o, *win.out).transpose(1, 0, *spatial, 2).reshape(g, -1, o)
        columns = self._dot(win, rows, w.reshape(g, o, -1), (2, 1)).reshape(g, n, *win.out, c, *win.kernel)
        # Each tap is a slab that lands, strided, on the padded input; C stays last, where the product has it.
        full = tuple(s + 2 * p for s, p in zip(win.size, win.padding, strict=True))
        total = None
        for at, tap in zip(win.offsets(), np.ndindex(*win.kernel), strict=True):
            spans = zip(full, at, win.out, win.stride, strict=True)
            high = tuple(f - a - (q - 1) * s - 1 for f, a, q, s in spans)
            placed = pad_spatial(columns[(..., *tap)], (*at, 0), (*high, 0), (*win.stride, 1))
            total = placed if total is None else total + placed
        assert total is not None
        inside = cut(total, (*win.padding, 0), (*win.size, c), (1,) * (win.rank + 1))
        return inside.transpose(1, 0, inside.ndim - 1, *range(2, 2 + win.rank)).reshape(n, g * c, *win.size)


class Pointwise:
    """Kernels of one element over many positions: a batch of matrix products that moves neither x nor y."""

    def _every(self, win: Window, x: jax.Array) -> jax.Array:
        x = pad_spatial(x, win.padding, tuple(max(h, 0) for h in win.overhang))
        return cut(x, (0,) * win.rank, win.out, win.stride).reshape(*x.shape[:2], -1)

    def _dot(self, win: Window, a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
        return product(a, b, (((over[0],), (over[1],)), ((0,), (0,))), precision=win.precision)

    def _copies(self, w: jax.Array, n: int) -> jax.Array:
        return jnp.broadcast_to(w.reshape(w.shape[:2]), (n, *w.shape[:2]))

    def forward(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        y = self._dot(win, self._copies(w, x.shape[0]), self._every(win, x), (2, 1))
        return y.reshape(x.shape[0], w.shape[0], *win.out)

    def weight_grad(self, win: Window, x: jax.Array, y: jax.Array) -> jax.Array:
        w = self._dot(win, y.reshape(*y.shape[:2], -1), self._every(win, x), (2, 2)).sum(0)
        return w.reshape(*w.shape, *win.kernel)

    def input_grad(self, win: Window, y: jax.Array, w: jax.Array) -> jax.Array:
        x = self._dot(win, self._copies(w, y.shape[0]), y.reshape(*y.shape[:2], -1), (1, 1))
        x = x.reshape(y.shape[0], w.shape[1], *win.out)
        spans = zip(win.size, win.padding, win.out, win.stride, strict=True)
        high = tuple(n + p - (o - 1) * s - 1 for n, p, o, s in spans)
        return pad_spatial(x, tuple(-p for p in win.padding), high, win.stride)


class Depthwise:
    """One input channel per group: a sum of shifted products that XLA fuses into a single loop."""

    def _widen(self, x: jax.Array) -> jax.Array:
        """In the accumulator's dtype, and stored so: XLA:CPU vectorises no loop over shifted half types."""
        acc = accumulator(x.dtype)
        return x if x.dtype == acc else lax.optimization_barrier(x.astype(acc))

    def _weights(self, win: Window, w: jax.Array) -> list[jax.Array]:
        """One `[C, m, 1...]` factor per tap, with m outputs per channel."""
        flat = w.astype(accumulator(w.dtype)).reshape(win.groups, -1, win.taps)
        return [flat[:, :, t].reshape(*flat.shape[:2], *(1,) * win.rank) for t in range(win.taps)]

    def _inputs(self, win: Window, x: jax.Array) -> list[jax.Array]:
        """One `[N, C, 1, *out]` slice per tap."""
        x = pad_spatial(self._widen(x), win.padding, tuple(max(h, 0) for h in win.overhang))[:, :, None]
        return [cut(x, at, win.out, win.stride) for at in win.offsets()]

    def _outputs(self, win: Window, y: jax.Array) -> jax.Array:
        return self._widen(y).reshape(y.shape[0], win.groups, -1, *y.shape[2:])

    def forward(self, win: Window, x: jax.Array, w: jax.Array) -> jax.Array:
        y = sum(v * f for v, f in zip(self._inputs(win, x), self._weights(win, w), strict=True))
        return jnp.asarray(y).reshape(x.shape[0], w.shape[0], *win.out)

    def input_grad(self, win: Window, y: jax.Array, w: jax.Array) -> jax.Array:
        wide = spread(win, self._outputs(win, y))
        total = 0
        for at, f in zip(win.offsets(), self._weights(win, w), strict=True):
            start = tuple(r - 1 - a for r, a in zip(win.reach, at, strict=True))
            total = total + cut(wide, start, win.size, (1,) * win.rank) * f
        return jnp.asarray(total).sum(2)

    def weight_grad(self, win: Window, x: jax.Array, y: jax.Array) -> jax.Array:
        y = self._outputs(win, y)
        over = (0, *range(3, 3 + win.rank))
        w = jnp.stack([(v * y).sum(over) for v in self._inputs(win, x)], -1)
        return w.reshape(-1, 1, *win.kernel)
