"""Pooling windows, one spatial dimension at a time: a pass over k slices per dimension instead of one over k * k.

Slices fuse into loops that XLA:CPU vectorises; its `reduce_window` does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .indexing import add_flat
from .platforms import variants

# The most elements of a window that are visited one by one: beyond it, programs get too long to compile.
MOST_TAPS = 64


@dataclass(frozen=True, slots=True)
class Axis:
    """Windows along one dimension: number `o` holds positions `o * stride - padding + t * dilation`, `t < kernel`."""

    size: int
    out: int
    kernel: int
    stride: int
    padding: int = 0
    dilation: int = 1

    @property
    def high(self) -> int:
        """Padding behind the input, negative where the last window ends before it does."""
        return (self.out - 1) * self.stride + (self.kernel - 1) * self.dilation + 1 - self.size - self.padding

    @property
    def tiles(self) -> bool:
        """Whether windows lie side by side from the first element on."""
        return self.padding == 0 and self.dilation == 1 and self.kernel == self.stride

    def position(self, t: int) -> np.ndarray:
        """Where the elements number `t` lie; outside of `[0, size)` is padding."""
        return np.arange(self.out) * self.stride - self.padding + t * self.dilation

    def tap(self, x: jax.Array, axis: int, t: int, fill: Any) -> jax.Array:
        """The elements number `t` of what `padded` has returned, which filled the padding."""
        first = t * self.dilation
        return lax.slice_in_dim(x, first, first + (self.out - 1) * self.stride + 1, self.stride, axis)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """torch's adaptive windows: window `o` is `[floor(o * size / out), ceil((o + 1) * size / out))`."""

    size: int
    out: int

    @property
    def starts(self) -> np.ndarray:
        return np.arange(self.out) * self.size // self.out

    @property
    def ends(self) -> np.ndarray:
        return -(-(np.arange(self.out) + 1) * self.size // self.out)

    @property
    def kernel(self) -> int:
        return int((self.ends - self.starts).max(initial=0))

    def position(self, t: int) -> np.ndarray:
        return np.where(self.starts + t < self.ends, self.starts + t, -1)

    def tap(self, x: jax.Array, axis: int, t: int, fill: Any) -> jax.Array:
        at = self.position(t)
        values = jnp.take(x, jnp.asarray(np.maximum(at, 0)), axis=axis, mode="clip")
        if (at >= 0).all():
            return values
        return jnp.where(at_axis(at >= 0, axis, x.ndim), values, np.asarray(fill, x.dtype))


def adaptive(size: int, out: int) -> Axis | Adaptive:
    """Adaptive windows, as plain ones where they are all alike."""
    return Axis(size, out, size // out, size // out) if out and size % out == 0 else Adaptive(size, out)


def at_axis(values: Any, axis: int, ndim: int) -> jax.Array:
    """A 1-d array laid along one dimension, to be broadcast over the others."""
    return jnp.asarray(values).reshape(tuple(-1 if d == axis else 1 for d in range(ndim)))


def pad_axis(x: jax.Array, axis: int, low: int, high: int, step: int = 1, fill: Any = 0) -> jax.Array:
    """Pad (negative: cut) one dimension, with `step - 1` fills between its elements."""
    if not (low or high or step > 1):
        return x
    config = [(low, high, step - 1) if d == axis else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, np.asarray(fill, x.dtype), config)


def padded(x: jax.Array, axes: tuple[Axis | Adaptive, ...], fill: Any) -> jax.Array:
    """`x` with `fill` around the trailing dimensions whose elements are visited one by one.

    All of them before the first is: a pass whose results are padded asks at every element whether it is one, and is
    not vectorised (3x3 maxima of [16, 64, 32, 32]: 2.4 ms, and 1.5 so).
    """
    for back, a in enumerate(reversed(axes)):
        if isinstance(a, Axis) and a.kernel <= MOST_TAPS:
            x = pad_axis(x, x.ndim - 1 - back, a.padding, max(a.high, 0), fill=fill)
    return x


def _positions(a: Axis | Adaptive) -> np.ndarray:
    """`[kernel, out]`: positions of all elements; padding repeats an element of the same window."""
    table = np.stack([a.position(t) for t in range(a.kernel)])
    real = (table >= 0) & (table < a.size)
    first = table[real.argmax(0), np.arange(a.out)]
    return np.where(real, table, first)


def _is_nan(x: jax.Array) -> Any:
    return x != x if jnp.issubdtype(x.dtype, jnp.floating) else False


def _better(v: jax.Array, i: jax.Array, w: jax.Array, j: jax.Array) -> jax.Array:
    """Whether ATen, scanning a window in order, would end with `(w, j)` of these two: first maximum, last nan."""
    both = _is_nan(v) & _is_nan(w)
    return jnp.where(both, j > i, (_is_nan(w) & ~both) | (w > v) | ((w == v) & (j < i)))


def lowest(dtype: Any) -> Any:
    """What no element is below."""
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def first_maximum(dtype: Any) -> tuple[tuple[Any, Any], Callable[[Any, Any], Any]]:
    """What a reduction of pairs of an element and its place begins with, and the one of two pairs that ATen ends with.
    In whatever order pairs are combined, it is the same one."""

    def pick(one: Any, two: Any) -> Any:
        take = _better(*one, *two)
        return jnp.where(take, two[0], one[0]), jnp.where(take, two[1], one[1])

    return (np.asarray(lowest(dtype), dtype), np.int32(np.iinfo(np.int32).max)), pick


def _max_wide(
    x: jax.Array, index: jax.Array | None, axis: int, a: Axis | Adaptive, pitch: int
) -> tuple[jax.Array, jax.Array]:
    """`max_windows` along one dimension for long windows: gathered, then reduced pairwise."""
    table = _positions(a)
    flat = at_axis(np.int32(table.reshape(-1) * pitch), axis, x.ndim)

    def gather(v: jax.Array) -> jax.Array:
        v = jnp.take(v, jnp.asarray(table.reshape(-1)), axis=axis, mode="clip")
        return v.reshape(*v.shape[:axis], a.kernel, a.out, *v.shape[axis + 1 :])

    shape = tuple(table.size if d == axis else n for d, n in enumerate(x.shape))
    places = jnp.broadcast_to(flat, shape).reshape(*shape[:axis], a.kernel, a.out, *shape[axis + 1 :])
    if index is not None:
        places = places + gather(index)

    start, pick = first_maximum(x.dtype)
    best, place = lax.reduce((gather(x), places), start, pick, (axis,))
    return best, place


@variants
def max_windows(x: jax.Array, axes: tuple[Axis | Adaptive, ...]) -> tuple[jax.Array, jax.Array]:
    """The maximum of each window over the trailing dimensions, and its flat index within them (int32).

    As in ATen the first of equal elements wins, the last nan wins, and a window of nothing but the lowest value
    reports its first element.
    """
    fill = lowest(x.dtype)
    x = padded(x, axes, fill)
    index, pitch, origin = None, 1, jnp.int32(0)
    for back, a in enumerate(reversed(axes)):
        axis = x.ndim - 1 - back
        origin = origin + at_axis(np.int32(_positions(a)[0] * pitch), axis, x.ndim)
        if a.kernel > MOST_TAPS:
            x, index = _max_wide(x, index, axis, a, pitch)
        else:
            shape = tuple(a.out if d == axis else n for d, n in enumerate(x.shape))
            best, place = jnp.full(shape, fill, x.dtype), jnp.broadcast_to(origin, shape)
            for t in range(a.kernel):
                v = a.tap(x, axis, t, fill)
                here = at_axis(np.int32(a.position(t) * pitch), axis, x.ndim)
                here = here if index is None else here + a.tap(index, axis, t, 0)
                take = (v > best) | _is_nan(v)
                best, place = jnp.where(take, v, best), jnp.where(take, here, place)
            x, index = best, place
        pitch *= a.size
    assert index is not None
    return x, index


def sum_windows(x: jax.Array, axes: tuple[Axis | Adaptive, ...]) -> jax.Array:
    """The sum of each window over the trailing dimensions."""
    x = padded(x, axes, 0)
    for back, a in enumerate(reversed(axes)):
        axis = x.ndim - 1 - back
        if a.kernel <= MOST_TAPS or isinstance(a, Adaptive):
            x = functools.reduce(jnp.add, (a.tap(x, axis, t, 0) for t in range(a.kernel)))
            continue
        x = pad_axis(x, axis, a.padding, a.high)
        if a.out == 1:
            x = x.sum(axis, keepdims=True)
            continue
        sizes = (a.kernel, a.stride, a.dilation)
        window, stride, dilation = ([v if d == axis else 1 for d in range(x.ndim)] for v in sizes)
        x = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, stride, "VALID", None, dilation)
    return x


def _spread(g: jax.Array, axis: int, a: Axis) -> jax.Array:
    """The transpose of `sum_windows` along one dimension."""
    if a.out == 1 and a.dilation == 1:
        wide = tuple(a.kernel if d == axis else n for d, n in enumerate(g.shape))
        return pad_axis(jnp.broadcast_to(g, wide), axis, -a.padding, -a.high)
    if a.tiles:
        return pad_axis(jnp.repeat(g, a.kernel, axis), axis, 0, -a.high)
    if a.kernel <= MOST_TAPS:
        parts = []
        for t in range(a.kernel):
            low = t * a.dilation - a.padding
            parts.append(pad_axis(g, axis, low, a.size - low - (a.out - 1) * a.stride - 1, a.stride))
        return functools.reduce(jnp.add, parts)
    reach = (a.kernel - 1) * a.dilation
    low = reach - a.padding
    g = pad_axis(g, axis, low, a.size + reach - low - (a.out - 1) * a.stride - 1, a.stride)
    window, dilation = ([v if d == axis else 1 for d in range(g.ndim)] for v in (a.kernel, a.dilation))
    return lax.reduce_window(g, np.zeros((), g.dtype), lax.add, window, (1,) * g.ndim, "VALID", None, dilation)


def _spread_adaptive(g: jax.Array, axis: int, a: Adaptive) -> jax.Array:
    """The transpose of `sum_windows` along one dimension of adaptive windows: each position gathers who covers it."""
    covers = [np.flatnonzero((a.starts <= p) & (p < a.ends)) for p in range(a.size)]
    total = None
    for t in range(max((len(c) for c in covers), default=0)):
        at = np.array([c[t] if t < len(c) else -1 for c in covers])
        v = jnp.take(g, jnp.asarray(np.maximum(at, 0)), axis=axis, mode="clip")
        if (at < 0).any():
            v = jnp.where(at_axis(at >= 0, axis, g.ndim), v, np.zeros((), g.dtype))
        total = v if total is None else total + v
    assert total is not None
    return total


def spread_windows(g: jax.Array, axes: tuple[Axis | Adaptive, ...]) -> jax.Array:
    """The transpose of `sum_windows`: each position gets the sum over the windows that cover it."""
    for back, a in enumerate(reversed(axes)):
        axis = g.ndim - 1 - back
        g = _spread_adaptive(g, axis, a) if isinstance(a, Adaptive) else _spread(g, axis, a)
    return g


def place_maxima(g: jax.Array, index: jax.Array, axes: tuple[Axis | Adaptive, ...]) -> jax.Array:
    """The transpose of taking maxima: each `g` is added at its `index` (flat within the trailing dimensions).

    Where windows lie side by side every position has one window and compares its own index, which fuses; an index
    outside of its window is then ignored.
    """
    size = tuple(a.size for a in axes)
    lead = g.shape[: g.ndim - len(axes)]
    index = index.astype(jnp.int32)
    tiled = [a for a in axes if isinstance(a, Axis) and a.tiles]
    if len(tiled) == len(axes):
        own: Any = 0
        for i, a in enumerate(tiled):
            axis = len(lead) + i
            g, index = (
                pad_axis(jnp.repeat(v, a.kernel, axis), axis, 0, -a.high, fill=f) for v, f in ((g, 0), (index, -1))
            )
            own = own + at_axis(np.int32(np.arange(a.size) * math.prod(size[i + 1 :])), axis, g.ndim)
        return jnp.where(index == own, g, np.zeros((), g.dtype))
    planes, cells = math.prod(lead), math.prod(size)
    if planes * cells >= 2**31:
        index = index.astype(jnp.int64)
    place = index.reshape(planes, -1) + (jnp.arange(planes, dtype=index.dtype) * cells)[:, None]
    flat = jnp.zeros((planes * cells,), g.dtype)
    # One flat index: XLA:CPU is then as fast as ATen.
    return add_flat(flat, place.reshape(-1), g.reshape(-1)).reshape(*lead, *size)
