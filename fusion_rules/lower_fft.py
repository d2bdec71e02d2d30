"""Fourier transforms: what is left of `torch.fft` below autograd, with torch's normalisations."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .lowering import Context
from .rule import OpClass, rule

BY_ROOT, BY_N = 1, 2
# XLA transforms at most this many trailing dimensions at once.
MOST_DIMS = 3


def _normalize(x: jax.Array, n: int, normalization: int) -> jax.Array:
    if normalization == 0:
        return x
    factor = 1 / math.sqrt(n) if normalization == BY_ROOT else 1 / n
    return x * np.asarray(factor, np.finfo(x.dtype).dtype)


def _last(x: jax.Array, dims: list[int]) -> jax.Array:
    return jnp.moveaxis(x, dims, range(x.ndim - len(dims), x.ndim))


def _first(x: jax.Array, dims: list[int]) -> jax.Array:
    return jnp.moveaxis(x, range(x.ndim - len(dims), x.ndim), dims)


def _complex(x: jax.Array, dims: list[int], forward: bool) -> jax.Array:
    """An unnormalised transform of complex values over any number of dimensions."""
    for i in range(0, len(dims), MOST_DIMS):
        part = dims[i : i + MOST_DIMS]
        sizes = tuple(x.shape[d] for d in part)
        x = _first(lax.fft(_last(x, part), lax.FftType.FFT if forward else lax.FftType.IFFT, sizes), part)
        if not forward:
            x = x * np.asarray(math.prod(sizes), np.finfo(x.dtype).dtype)
    return x


def _dims(x: Any, dim: Any) -> list[int]:
    return [d % x.ndim for d in dim]


@rule("_fft_c2c.default", OpClass.FFT)
def fft_c2c(cx: Context, self: Any, dim: Any, normalization: int, forward: bool) -> Any:
    dims = _dims(self, dim)
    if 0 in self.shape:
        return self
    n = math.prod(self.shape[d] for d in dims)
    return _normalize(_complex(self, dims, forward), n, normalization)


@rule("_fft_r2c.default", OpClass.FFT)
def fft_r2c(cx: Context, self: Any, dim: Any, normalization: int, onesided: bool) -> Any:
    """Of real values; `onesided` keeps half of the last of `dim`, the rest being its mirror image."""
    dims = _dims(self, dim)
    if 0 in cx.out[0].shape:
        return jnp.zeros(cx.out[0].shape, jnp.complex64)
    n = math.prod(self.shape[d] for d in dims)
    if onesided:
        last = dims[-1:]
        half = _first(lax.fft(_last(self, last), lax.FftType.RFFT, (self.shape[last[0]],)), last)
        x = _complex(half, dims[:-1], True)
    else:
        x = _complex(lax.complex(self, jnp.zeros_like(self)), dims, True)
    return _normalize(x, n, normalization)


@rule("_fft_c2r.default", OpClass.FFT)
def fft_c2r(cx: Context, self: Any, dim: Any, normalization: int, last_dim_size: int) -> Any:
    """To real values, from the half that `_fft_r2c` keeps; `last_dim_size` is the length of the result's last dim."""
    dims = _dims(self, dim)
    if 0 in cx.out[0].shape:
        return jnp.zeros(cx.out[0].shape, jnp.float32)
    last = dims[-1:]
    x = _complex(self, dims[:-1], False)
    # XLA wants exactly the half that is needed.
    x = lax.slice_in_dim(x, 0, min(last_dim_size // 2 + 1, x.shape[last[0]]), axis=last[0])
    missing = last_dim_size // 2 + 1 - x.shape[last[0]]
    config = [(0, missing, 0) if d == last[0] else (0, 0, 0) for d in range(x.ndim)]
    x = lax.pad(x, np.zeros((), x.dtype), config)
    x = _first(lax.fft(_last(x, last), lax.FftType.IRFFT, (last_dim_size,)), last)
    # Of infinite inputs MKL makes NaN, also where all that is added is of one sign.
    x = lax.select(lax.abs(x) == np.inf, lax.full_like(x, np.nan), x)
    n = math.prod(cx.out[0].shape[d] for d in dims)
    return _normalize(x * np.asarray(last_dim_size, x.dtype), n, normalization)
