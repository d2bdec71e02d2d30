"""Random numbers drawn inside a region: counter-based, so that they depend on nothing but `seed` and `offset`.

The ops are our own (namespace `fused_eager`): an accelerator has no generator of ATen's. Both numbers are inputs of the
region, so another seed compiles nothing, and a draw is the same in every mode, at every cut and on every platform.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), as `jax.random` has it
(Threefry-2x32).
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from .lowering import Context
from .rule import RULES, OpClass, rule
from .spec import JAX_DTYPE, Spec, contiguous_strides

# Before jax 0.8 it was elsewhere.
_jax: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")

_LIBRARY = torch.library.Library("fused_eager", "FRAGMENT")
_LIKE = "*, ScalarType dtype, Device? device=None) -> Tensor"
_SCHEMAS = (
    f"random_uniform(int[] size, int seed, int offset, {_LIKE}",
    f"random_normal(int[] size, int seed, int offset, float mean, float std, {_LIKE}",
    f"random_bits(int[] size, int seed, int offset, {_LIKE}",
)


def _enter(schema: str) -> None:
    name = _LIBRARY.define(schema).removeprefix("fused_eager::")

    def drawn(size: list[int], *numbers: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        """The same numbers on the host, where a region is run op by op or once more; of a shape alone the shape."""
        like = torch.empty(size, dtype=dtype, device=device)
        if type(like) is not torch.Tensor or not like.is_cpu:
            return like
        spec = Spec(tuple(size), dtype, contiguous_strides(tuple(size)), like.device)
        with _jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            given = [jnp.asarray(n, jnp.int64 if isinstance(n, int) else jnp.float64) for n in numbers]
            found = RULES[f"fused_eager.{name}.default"].lower(Context((spec,)), size, *given)
            return torch.from_numpy(np.array(found, copy=True))

    _LIBRARY.impl(name, drawn, "CompositeExplicitAutograd")


for _schema in _SCHEMAS:
    _enter(_schema)


def _key(seed: Any, offset: Any) -> Any:
    """The key of one draw: each `offset` of a `seed` has its own."""
    words = [lax.convert_element_type(lax.shift_right_logical(seed, jnp.int64(n)), jnp.uint32) for n in (32, 0)]
    key = jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32")
    low, high = (lax.convert_element_type(lax.shift_right_logical(offset, jnp.int64(n)), jnp.uint32) for n in (0, 32))
    return jax.random.fold_in(jax.random.fold_in(key, low), high)


@rule("fused_eager.random_uniform.default", OpClass.FACTORY, hoist=["seed", "offset"])
def random_uniform(cx: Context, size: Any, seed: Any, offset: Any, **options: Any) -> Any:
    """Numbers from [0, 1)."""
    dtype = JAX_DTYPE[cx.out[0].dtype]
    return jax.random.uniform(_key(jnp.asarray(seed), jnp.asarray(offset)), cx.out[0].shape, dtype)


@rule(
    "fused_eager.random_normal.default",
    OpClass.FACTORY,
    hoist=["seed", "offset", "mean", "std"],
    alone=True,
    note="a region by itself: the last bits of a logarithm depend on how the loop around it is vectorised",
)
def random_normal(cx: Context, size: Any, seed: Any, offset: Any, mean: Any, std: Any, **options: Any) -> Any:
    """Numbers of a normal distribution."""
    dtype = JAX_DTYPE[cx.out[0].dtype]
    drawn = jax.random.normal(_key(jnp.asarray(seed), jnp.asarray(offset)), cx.out[0].shape, dtype)
    return drawn * lax.convert_element_type(std, dtype) + lax.convert_element_type(mean, dtype)


@rule("fused_eager.random_bits.default", OpClass.FACTORY, hoist=["seed", "offset"])
def random_bits(cx: Context, size: Any, seed: Any, offset: Any, **options: Any) -> Any:
    """Whole numbers from [0, 2^63)."""
    bits = jax.random.bits(_key(jnp.asarray(seed), jnp.asarray(offset)), cx.out[0].shape, jnp.uint64)
    return lax.convert_element_type(lax.shift_right_logical(bits, jnp.uint64(1)), jnp.int64)
