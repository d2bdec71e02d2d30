"""Interpolation over the trailing dimensions, and the unfolding of windows into columns.

Source positions and weights are computed while lowering, in the precision in which ATen computes them: a rounding
apart would be a different pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .convolution import pad_spatial
from .lowering import Context, NoLowering
from .precision import accumulator, rounded
from .rule import OpClass, rule
from .taps import Taps, apply_taps

Maker = Callable[[int, int, bool, float | None, Any], Taps]


def _scale(size: int, out: int, align: bool, factor: float | None, real: Any) -> Any:
    """Input positions per output position, in ATen's arithmetic (`real` is its type)."""
    if align:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1.0 / factor) if factor is not None and factor > 0 else real(size) / real(out)


def _positions(size: int, out: int, align: bool, factor: float | None, real: Any) -> np.ndarray:
    """Where each output lies in the input; not clamped."""
    scale, i = _scale(size, out, align, factor, real), np.arange(out).astype(real)
    return scale * i if align else scale * (i + real(0.5)) - real(0.5)


def nearest(size: int, out: int, align: bool, factor: float | None, real: Any) -> Taps:
    scale = _scale(size, out, False, factor, real)
    # ATen floors in float32 whatever the type.
    index = np.floor((np.arange(out).astype(real) * scale).astype(np.float32)).astype(np.int64)
    return Taps(size, np.minimum(index, size - 1)[None], np.ones((1, out)))


def nearest_float(size: int, out: int, align: bool, factor: float | None, real: Any) -> Taps:
    """The gradient's indices: ATen computes these in float32, and treats two ratios by integers."""
    if out in (size, 2 * size):
        return Taps(size, (np.arange(out) // (out // max(size, 1)))[None], np.ones((1, out)))
    return nearest(size, out, align, factor, np.float32)


def nearest_exact(size: int, out: int, align: bool, factor: float | None, real: Any) -> Taps:
    scale = _scale(size, out, False, factor, real)
    index = np.floor(((np.arange(out) + 0.5).astype(real) * scale).astype(np.float32)).astype(np.int64)
    return Taps(size, np.minimum(index, size - 1)[None], np.ones((1, out)))


def linear(size: int, out: int, align: bool, factor: float | None, real: Any) -> Taps:
    if size == out:
        return Taps(size, np.arange(out)[None], np.ones((1, out)))
    at = _positions(size, out, align, factor, real)
    at = np.where(at < 0, real(0), at)
    low = np.minimum(np.floor(at.astype(np.float32)).astype(np.int64), size - 1)
    part = np.clip(at - low.astype(real), real(0), real(1))
    return Taps(size, np.stack([low, np.minimum(low + 1, size - 1)]), np.stack([real(1) - part, part]))


def _cubic_weights(t: np.ndarray) -> np.ndarray:
    a = t.dtype.type(-0.75)

    def near(x: np.ndarray) -> np.ndarray:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: np.ndarray) -> np.ndarray:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)])


def cubic(size: int, out: int, align: bool, factor: float | None, real: Any) -> Taps:
    at = _positions(size, out, align, factor, real)
    low = np.minimum(np.floor(at.astype(np.float32)).astype(np.int64), size - 1)
    part = np.clip(at - low.astype(real), real(0), real(1))
    index = np.clip(low + np.arange(-1, 3)[:, None], 0, size - 1)
    return Taps(size, index, _cubic_weights(part))


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic_filter(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos_filter(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def antialiased(width: int, kernel: Callable[[np.ndarray], np.ndarray]) -> Maker:
    """A map that averages with a filter stretched over the input pixels of each output."""

    def make(size: int, out: int, align: bool, factor: float | None, real: Any) -> Taps:
        scale = _scale(size, out, align, factor, real)
        support = real(width * 0.5) * scale if scale >= 1 else real(width * 0.5)
        inverse = real(1) / scale if scale >= 1 else real(1)
        shift = real(0.5)
        center = scale * (np.arange(out).astype(real) + shift)
        first = np.maximum((center - support + shift).astype(np.int64), 0)
        count = np.minimum((center + support + shift).astype(np.int64), size) - first
        count = np.clip(count, 0, math.ceil(support) * 2 + 1)
        index = np.full((int(count.max(initial=0)), out), -1, np.int64)
        weight = np.zeros(index.shape)
        for i in range(out):
            taps = np.arange(count[i])
            w = kernel(((taps + first[i]).astype(real) - center[i] + shift) * inverse).astype(real)
            total = w.sum()
            index[: count[i], i], weight[: count[i], i] = taps + first[i], w / total if total != 0 else w
        return Taps(size, index, weight)

    return make


def _real(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


def _resize(x: jax.Array, maps: list[Taps], between: Any = None) -> jax.Array:
    """Apply one map per trailing dimension, the innermost first; `between` rounds what ATen stores in between."""
    for back, taps in enumerate(reversed(maps)):
        if back and between is not None:
            x = rounded(x, between)
        x = apply_taps(x, x.ndim - 1 - back, taps)
    return x


# name of the kind, its map, that of its gradient, whether it takes `align_corners`, and ATen's names by rank
KINDS: list[tuple[Maker, Maker, bool, dict[int, str]]] = [
    (nearest, nearest_float, False, {r: f"upsample_nearest{r}d" for r in (1, 2, 3)}),
    (nearest_exact, nearest_exact, False, {r: f"_upsample_nearest_exact{r}d" for r in (1, 2, 3)}),
    (linear, linear, True, {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}),
    (cubic, cubic, True, {2: "upsample_bicubic2d"}),
    (antialiased(2, _triangle), antialiased(2, _triangle), True, {2: "_upsample_bilinear2d_aa"}),
    (antialiased(4, _cubic_filter), antialiased(4, _cubic_filter), True, {2: "_upsample_bicubic2d_aa"}),
    (antialiased(6, _lanczos_filter), antialiased(6, _lanczos_filter), True, {2: "_upsample_lanczos2d_aa"}),
]


def _enter(make: Maker, make_grad: Maker, aligns: bool, rank: int, name: str) -> None:
    antialias = name.endswith("_aa")
    exact = make in (nearest, nearest_exact)

    def split(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, list[float | None]]:
        """`align_corners` and the scale factors of an overload's last arguments."""
        names = ["scales"] if rank == 1 else [f"scales_{d}" for d in "dhw"[3 - rank :]]
        named = dict(zip((["align_corners"] if aligns else []) + names, rest, strict=False)) | kwargs
        return bool(named.get("align_corners", False)), [named.get(n) for n in names]

    def forward(cx: Context, self: Any, output_size: Any, *rest: Any, **kwargs: Any) -> Any:
        align, factors = split(rest, kwargs)
        out = cx.out[0].shape
        if not jnp.issubdtype(self.dtype, jnp.floating) and not exact:
            raise NoLowering("ATen interpolates integers in fixed point")
        x = self if exact else self.astype(accumulator(self.dtype))
        sizes = zip(self.shape[-rank:], out[-rank:], factors, strict=True)
        maps = [make(n, m, align, f, _real(self.dtype)) for n, m, f in sizes]
        return _resize(x, maps, cx.out[0].dtype if antialias else None)

    def backward(cx: Context, grad_output: Any, output_size: Any, input_size: Any, *rest: Any, **kwargs: Any) -> Any:
        align, factors = split(rest, kwargs)
        sizes = zip(cx.out[0].shape[-rank:], grad_output.shape[-rank:], factors, strict=True)
        maps = [make_grad(n, m, align, f, _real(grad_output.dtype)).transposed() for n, m, f in sizes]
        g = grad_output.astype(accumulator(grad_output.dtype))
        return _resize(g, maps, cx.out[0].dtype if antialias else None)

    rule(f"{name}.default", OpClass.WINDOW)(forward)
    rule(f"{name}_backward.default", OpClass.WINDOW)(backward)


for _make, _make_grad, _aligns, _names in KINDS:
    for _rank, _name in _names.items():
        _enter(_make, _make_grad, _aligns, _rank, _name)


def _columns(size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> tuple[int, ...]:
    """How many windows fit along each dimension."""
    spans = zip(size, kernel, dilation, padding, stride, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in spans)


@rule("im2col.default", OpClass.WINDOW)
def im2col(cx: Context, self: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """`[..., C, H, W]` to `[..., C * kh * kw, windows]`."""
    out = _columns(self.shape[-2:], kernel_size, dilation, padding, stride)
    x = pad_spatial(self, tuple(padding), tuple(padding))
    parts = []
    for at in np.ndindex(*kernel_size):
        (a, b), (s, t) = (i * d for i, d in zip(at, dilation, strict=True)), stride
        parts.append(x[..., a : a + (out[0] - 1) * s + 1 : s, b : b + (out[1] - 1) * t + 1 : t])
    return jnp.stack(parts, -3).reshape(cx.out[0].shape)


@rule("col2im.default", OpClass.WINDOW)
def col2im(cx: Context, self: Any, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """The transpose of `im2col`: overlapping windows add up."""
    shape = cx.out[0].shape
    out = _columns(output_size, kernel_size, dilation, padding, stride)
    parts = self.astype(accumulator(self.dtype)).reshape(*shape[:-2], math.prod(kernel_size), *out)
    total = jnp.zeros(shape, parts.dtype)
    for number, at in enumerate(np.ndindex(*kernel_size)):
        low = tuple(i * d - p for i, d, p in zip(at, dilation, padding, strict=True))
        high = tuple(n - a - (o - 1) * s - 1 for n, a, o, s in zip(output_size, low, out, stride, strict=True))
        total = total + pad_spatial(parts[..., number, :, :], low, high, tuple(stride))
    return total
