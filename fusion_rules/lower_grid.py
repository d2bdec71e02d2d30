"""Sampling an image at positions that are values: `grid_sampler` in two and three dimensions, and affine grids.

The gradient of a position comes from JAX differentiating the weights; what ATen defines differently from the calculus
(clipped and reflected coordinates) is a factor computed beside the coordinate.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .indexing import read_flat
from .lowering import Context
from .precision import accumulator
from .rule import OpClass, rule

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
Coordinate = tuple[jax.Array, jax.Array]


def _unnormalize(x: jax.Array, size: int, align: bool) -> Coordinate:
    """From [-1, 1] to pixels, and the derivative."""
    if align:
        return (x + 1) / 2 * (size - 1), jnp.full_like(x, (size - 1) / 2)
    return ((x + 1) * size - 1) / 2, jnp.full_like(x, size / 2)


def _clip(x: jax.Array, size: int, lost: float) -> Coordinate:
    top = size - 1
    inside = (x > 0) & (x < top)
    edge = jnp.where(x <= 0, 0.0, jnp.where(x >= top, float(top), lost))
    moves = inside | jnp.isnan(x) if math.isnan(lost) else inside
    return jnp.where(inside, x, edge.astype(x.dtype)), moves.astype(x.dtype)


def _reflect(x: jax.Array, size: int, align: bool) -> Coordinate:
    low, span = (0.0, float(size - 1)) if align else (-0.5, float(size))
    if span <= 0:
        return jnp.zeros_like(x), jnp.zeros_like(x)
    x = x - low
    sign = jnp.where(x < 0, -1.0, 1.0).astype(x.dtype)
    x = jnp.abs(x)
    rest = lax.rem(x, jnp.full_like(x, span))
    even = (lax.rem(jnp.floor(x / span), jnp.full_like(x, 2)) == 0) | ~lax.is_finite(x)
    return jnp.where(even, rest + low, span - rest + low), jnp.where(even, sign, -sign)


# Where ATen looks for what is nowhere.
OUTSIDE = -100.0


def _lost(rank: int, size: int, backward: bool, stays: bool) -> float:
    """Where a coordinate that is NaN ends once it is clipped: ATen's kernels for images take the first pixel, those for
    volumes the last one, and for gradients none, or leave it NaN where it `stays`."""
    if rank == 2:
        return 0.0
    if backward:
        return math.nan if stays else OUTSIDE
    return float(size - 1)


def _into(
    x: jax.Array, size: int, padding: int, align: bool, rank: int, backward: bool, stays: bool = False
) -> Coordinate:
    """A pixel coordinate as the padding mode moves it, and the derivative; with `stays` one of a volume may be NaN."""
    if padding == ZEROS:
        # ATen's weights for images are NaN there, and volumes have none.
        somewhere = lax.is_finite(x) | jnp.isnan(x) if stays else lax.is_finite(x)
        return (jnp.where(somewhere, x, OUTSIDE) if rank == 3 else x), jnp.ones_like(x)
    lost = _lost(rank, size, backward, stays)
    if padding == BORDER:
        return _clip(x, size, lost)
    y, slope = _reflect(x, size, align)
    z, kept = _clip(y, size, lost)
    return z, slope * kept


def _inside(corner: list[jax.Array], size: tuple[int, ...]) -> jax.Array:
    return _all([(c >= 0) & (c <= n - 1) for c, n in zip(corner, size, strict=True)])


def _read(image: jax.Array, corner: list[jax.Array]) -> jax.Array:
    """Pixels at whole-number positions (one array `[N, P]` per dimension): `[N, C, P]`, 0 outside the image."""
    size = image.shape[2:]
    inside = _inside(corner, size)
    index = jnp.zeros(corner[0].shape, jnp.int32)
    for c, n in zip(corner, size, strict=True):
        index = index * n + jnp.where(inside, c, 0).astype(jnp.int32)
    n, c = image.shape[:2]
    # One flat index per element: its transpose is a scatter over one dimension, the only kind XLA:CPU does well.
    kind = jnp.int32 if image.size < 2**31 else jnp.int64
    plane = jnp.arange(n * c, dtype=kind).reshape(n, c, 1) * math.prod(size)
    read = read_flat(image.reshape(-1), plane + index[:, None])
    return jnp.where(inside[:, None], read, jnp.zeros((), image.dtype))


def _as_index(x: jax.Array, rank: int) -> jax.Array:
    """A whole number as C++ casts it: in volumes the NaN that are left are 0."""
    return jnp.where(jnp.isnan(x), 0, x) if rank == 3 else x


def _all(masks: list[jax.Array]) -> jax.Array:
    """All of several masks."""
    out = masks[0]
    for m in masks[1:]:
        out = out & m
    return out


def _cubic(t: jax.Array) -> list[jax.Array]:
    a = -0.75

    def near(x: jax.Array) -> jax.Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: jax.Array) -> jax.Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _sample(image: jax.Array, place: list[jax.Array], mode: int, padding: int, align: bool) -> jax.Array:
    """`[N, C, P]` from coordinates in pixels, already moved by the padding mode (bicubic: not yet)."""
    size = image.shape[2:]
    if mode == NEAREST:
        return _read(image, [_as_index(lax.round(p, lax.RoundingMethod.TO_NEAREST_EVEN), len(size)) for p in place])
    base = [lax.stop_gradient(_as_index(jnp.floor(p), len(size))) for p in place]
    part = [p - b for p, b in zip(place, base, strict=True)]
    if mode == BILINEAR:
        reach, weights = range(2), [[1 - t, t] for t in part]
    else:
        reach, weights = range(-1, 3), [_cubic(t) for t in part]
    total = None
    for step in itertools.product(range(len(reach)), repeat=len(size)):
        corner = [b + reach[s] for b, s in zip(base, step, strict=True)]
        if mode == BICUBIC:
            corner = [_into(c, n, padding, align, len(size), False)[0] for c, n in zip(corner, size, strict=True)]
        factors = [w[s] for w, s in zip(weights, step, strict=True)]
        if len(size) == 3:
            # For images ATen multiplies by what lies outside, for volumes it leaves it out.
            inside = _inside(corner, size)
            factors = [jnp.where(inside, factor, 0) for factor in factors]
        weight = math.prod(factors[1:], start=factors[0])
        term = _read(image, corner) * weight[:, None]
        total = term if total is None else total + term
    assert total is not None
    return total


def _places(
    grid: jax.Array, size: tuple[int, ...], mode: int, padding: int, align: bool, backward: bool
) -> list[Coordinate]:
    """Pixel coordinates `[N, P]` per dimension of the image, with their derivatives; the grid has x first."""
    stays = grid.dtype == jnp.bfloat16  # of which ATen does not see that it is NaN, and takes the first voxel
    grid = grid.astype(accumulator(grid.dtype))
    flat = grid.reshape(grid.shape[0], -1, grid.shape[-1])
    found = []
    for d, n in enumerate(size):
        x, slope = _unnormalize(flat[..., len(size) - 1 - d], n, align)
        if mode != BICUBIC:
            x, more = _into(x, n, padding, align, len(size), backward, stays)
            slope = slope * more
        found.append((x, slope))
    return found


@rule(["grid_sampler_2d.default", "grid_sampler_3d.default"], OpClass.GATHER)
def grid_sampler(
    cx: Context, input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    acc = accumulator(input.dtype)
    shape = cx.out[0].shape
    if 0 in shape:
        return jnp.zeros(shape, acc)
    places = _places(grid, input.shape[2:], interpolation_mode, padding_mode, align_corners, False)
    out = _sample(input.astype(acc), [p for p, _ in places], interpolation_mode, padding_mode, align_corners)
    return out.reshape(shape)


@rule(["grid_sampler_2d_backward.default", "grid_sampler_3d_backward.default"], OpClass.SCATTER)
def grid_sampler_backward(
    cx: Context, grad_output: Any, input: Any, grid: Any, interpolation_mode: int, padding_mode: int,
    align_corners: bool, output_mask: Any,
) -> Any:  # fmt: skip
    acc = accumulator(input.dtype)
    if 0 in grad_output.shape:
        zeros = [jnp.zeros(x.shape, acc) for x in (input, grid)]
        return tuple(z for z, wanted in zip(zeros, output_mask, strict=False) if wanted) or zeros[1]
    image, g = input.astype(acc), grad_output.astype(acc).reshape(*grad_output.shape[:2], -1)
    places = _places(grid, input.shape[2:], interpolation_mode, padding_mode, align_corners, True)

    def run(image: Any, place: Any) -> Any:
        return _sample(image, place, interpolation_mode, padding_mode, align_corners)

    pull = jax.vjp(run, image, [p for p, _ in places])[1]
    d_image, d_place = pull(g)
    slopes = [d * slope for d, (_, slope) in zip(d_place, places, strict=True)]
    d_grid = jnp.stack(slopes[::-1], -1).reshape(grid.shape)
    if interpolation_mode == NEAREST:
        d_grid = jnp.zeros(grid.shape, acc)
    # ATen always gives the gradient of the grid; only that of the image can be left out.
    return (d_image, d_grid) if output_mask[0] else (d_grid,)


@rule("affine_grid_generator.default", OpClass.CONTRACTION)
def affine_grid_generator(cx: Context, theta: Any, size: Any, align_corners: bool) -> Any:
    """theta `[N, r, r + 1]` to positions `[N, *size, r]`, last dimension first."""
    spatial = tuple(size[2:])
    acc = accumulator(theta.dtype)

    def steps(n: int) -> np.ndarray:
        if n <= 1:
            return np.zeros(n)
        line = np.linspace(-1, 1, n)
        return line if align_corners else line * (n - 1) / n

    axes = np.meshgrid(*[steps(n) for n in spatial], np.ones(1), indexing="ij")
    *own, one = (a[..., 0] for a in axes)
    base = np.stack([*own[::-1], one], -1).reshape(-1, len(spatial) + 1)
    points = jnp.asarray(base, acc)
    grid = (points[None, :, None, :] * theta.astype(acc)[:, None]).sum(-1)
    return grid.reshape(theta.shape[0], *spatial, len(spatial))
