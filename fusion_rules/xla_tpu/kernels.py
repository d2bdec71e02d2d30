"""What all of JAX's Pallas kernels need here: lengths of whole blocks, and a trace that Mosaic takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from ..precision import matmul_precision
from .kernel_costs import estimated

LANES = 128  # of a vector register: blocks are multiples of it, and heads as well, or narrower
BLOCKS = (512, 256, 128)


def block(n: int, widest: int = BLOCKS[0]) -> int:
    """The widest block of those that `n`, a multiple of `LANES`, consists of."""
    return next(size for size in BLOCKS if size <= widest and n % size == 0)


def filled_up(x: jax.Array, axis: int, length: int, value: float = 0) -> jax.Array:
    """An array with an axis as long as `length`, filled up with a value."""
    more = length - x.shape[axis]
    return jnp.pad(x, [(0, more * (i == axis)) for i in range(x.ndim)], constant_values=value) if more else x


def exactly(function: Callable[..., Any], dtype: Any, *arrays: jax.Array) -> Any:
    """What a function of a Pallas kernel makes of arrays, traced without 64-bit numbers, which Mosaic does not have.
    XLA is told what the kernel takes.

    Products of float32 are exact as elsewhere: Mosaic has all passes, or one.
    """
    exact = dtype == jnp.float32 and matmul_precision() != jax.lax.Precision.DEFAULT
    with jax.enable_x64(False), jax.default_matmul_precision("highest" if exact else "default"):
        traced, form = jax.make_jaxpr(function, return_shape=True)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(form), jaxpr_as_fun(estimated(traced))(*arrays))
