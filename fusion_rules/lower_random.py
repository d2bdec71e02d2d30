"""Random numbers drawn inside a region: counter-based, so that they depend on nothing but `seed` and `offset`.

The ops are our own (namespace `fused_eager`): an accelerator has no generator of ATen's. Both numbers are inputs of the
region, so another seed compiles nothing, and a draw is the same in every mode, at every cut and on every platform.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), as `jax.random` has it
(Threefry-2x32).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from .lowering import EXCEPTIONS, Context
from .platforms import variants
from .rule import RULES, OpClass, rule
from .spec import JAX_DTYPE, Spec, contiguous_strides

# Before jax 0.8 it was elsewhere.
_jax: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")

_LIBRARY = torch.library.Library("fused_eager", "FRAGMENT")
_LIKE = "*, ScalarType dtype, Device? device=None) -> Tensor"
_SCHEMAS = (
    f"random_uniform(int[] size, int seed, int offset, {_LIKE}",
    f"random_normal(int[] size, int seed, int offset, float mean, float std, {_LIKE}",
    f"random_exponential(int[] size, int seed, int offset, {_LIKE}",
    f"random_bits(int[] size, int seed, int offset, {_LIKE}",
    f"random_mask(int[] size, int seed, int offset, float p, {_LIKE}",
)


def _enter(schema: str) -> None:
    name = _LIBRARY.define(schema).removeprefix("fused_eager::")

    def drawn(size: list[int], *numbers: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        """The same numbers on the host, where a region is run op by op or once more; of a shape alone the shape."""
        like = torch.empty(size, dtype=dtype, device=device)
        if type(like) is not torch.Tensor or not like.is_cpu:
            return like
        spec = Spec(tuple(size), dtype, contiguous_strides(tuple(size)), like.device)
        with _jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            given = [jnp.asarray(n, jnp.int64 if isinstance(n, int) else jnp.float64) for n in numbers]
            found = RULES[f"fused_eager.{name}.default"].lower(Context((spec,)), size, *given)
            return torch.from_numpy(np.array(found, copy=True))

    _LIBRARY.impl(name, drawn, "CompositeExplicitAutograd")


for _schema in _SCHEMAS:
    _enter(_schema)


def _array(t: torch.Tensor) -> jax.Array:
    return jnp.from_dlpack(t.detach().contiguous().clone())


def _enter_reading(schema: str, shape: Callable[..., tuple[int, ...]], dtype: torch.dtype | None) -> None:
    """Define an op that looks at tensors: `shape` and `dtype` (or the first one's) are its result's."""
    name = _LIBRARY.define(schema).removeprefix("fused_eager::")

    def read(self: torch.Tensor, *given: Any) -> torch.Tensor:
        """The same on the host, its checks made; of a shape alone the shape."""
        made = shape(self, *given)
        like = self.new_empty(made, dtype=dtype or self.dtype)
        if type(self) is not torch.Tensor or not self.is_cpu:
            return like
        cx = Context((Spec(made, like.dtype, contiguous_strides(made), like.device),))
        with _jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            arrays = [_array(x) if isinstance(x, torch.Tensor) else x for x in (self, *given)]
            found = jnp.asarray(RULES[f"fused_eager.{name}.default"].lower(cx, *arrays))
            for check in cx.checks:
                if bool(check.bad):
                    raise EXCEPTIONS[check.error](check.message)
            return torch.from_dlpack(found).clone()

    _LIBRARY.impl(name, read, "CompositeExplicitAutograd")


_enter_reading(
    "multinomial_of(Tensor self, Tensor drawn, int num_samples, bool replacement) -> Tensor",
    lambda self, drawn, count, *_: (*self.shape[:-1], count),
    torch.int64,
)
_enter_reading("checked_probabilities(Tensor self) -> Tensor", lambda self: tuple(self.shape), None)


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


@rule("fused_eager.random_mask.default", OpClass.FACTORY, hoist=["seed", "offset", "p"])
def random_mask(cx: Context, size: Any, seed: Any, offset: Any, p: Any, **options: Any) -> Any:
    """Booleans, of which each is False with probability `p`."""
    drawn = jax.random.uniform(_key(jnp.asarray(seed), jnp.asarray(offset)), cx.out[0].shape, np.float32)
    return computed_once(drawn >= lax.convert_element_type(p, np.float32))


@variants
def computed_once(mask: Any) -> Any:
    """A drawn mask, which is read in the forward and in the backward pass: whether it is drawn for each is the
    compiler's choice."""
    return mask


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


@rule("fused_eager.checked_probabilities.default", OpClass.POINTWISE, may_raise=True)
def checked_probabilities(cx: Context, self: Any) -> Any:
    """The tensor as it is, where all of it lies between 0 and 1."""
    cx.check(~((self >= 0) & (self <= 1)).all(), "RuntimeError", _PROBABILITY)
    return self


_PROBABILITY = (
    "Expected p_in >= 0 && p_in <= 1 to be true, but got false.  (Could this error message be improved?  If so, "
    "please report an enhancement request to PyTorch.)"
)
_WEIGHT = "probability tensor contains either `inf`, `nan` or element < 0"
_ENTRY = "invalid multinomial distribution (encountering probability entry {})"
_NO_WEIGHT = "invalid multinomial distribution (sum of probabilities <= 0)"


@rule(
    "fused_eager.random_exponential.default",
    OpClass.FACTORY,
    hoist=["seed", "offset"],
    alone=True,
    note="a region by itself, as `random_normal` is",
)
def random_exponential(cx: Context, size: Any, seed: Any, offset: Any, **options: Any) -> Any:
    """Numbers of the exponential distribution of rate 1, none of them 0: programs divide by them."""
    dtype = JAX_DTYPE[cx.out[0].dtype]
    word = np.uint64 if dtype == np.float64 else np.uint32
    bits = jax.random.bits(_key(jnp.asarray(seed), jnp.asarray(offset)), cx.out[0].shape, word).astype(dtype)
    # Fine near 0, where the least of many are, and less than 1.
    u = (bits + dtype.type(0.5)) * dtype.type(0.5 ** (8 * np.dtype(word).itemsize))
    return -jnp.log1p(-jnp.clip(u, max=dtype.type(1 - jnp.finfo(dtype).epsneg)))


@rule("fused_eager.multinomial_of.default", OpClass.SORT, may_raise=True)
def multinomial_of(cx: Context, self: Any, drawn: Any, num_samples: int, replacement: bool) -> Any:
    """Positions along the last dimension, drawn by weights that need not add up to 1. One of weight 0 is never drawn
    before all others are.

    One draw, or several without replacement, are the largest of weight / q, q exponential (Efraimidis, Spirakis,
    "Weighted random sampling with a reservoir", 2006). Several with replacement are found in the running sums.
    """
    p = self.astype(drawn.dtype)
    if replacement and num_samples > 1:  # of which eager speaks in other words
        cx.check(~(p >= 0).all(), "RuntimeError", _ENTRY.format("< 0"))
        cx.check((p == np.inf).any(), "RuntimeError", _ENTRY.format("= infinity or NaN"))
    else:
        cx.check(~((p >= 0) & (p < np.inf)).all(), "RuntimeError", _WEIGHT)
    cx.check((p.sum(-1) <= 0).any(), "RuntimeError", _NO_WEIGHT)
    if num_samples == 1:
        return jnp.argmax(p / drawn, axis=-1, keepdims=True).astype(np.int64)
    if not replacement:
        return lax.top_k(p / drawn, num_samples)[1].astype(np.int64)
    # The running sum stands still where the weight is 0, in whatever order it is added up.
    total = lax.cummax(jnp.where(p > 0, jnp.cumsum(p, -1), 0), axis=p.ndim - 1)

    def find(total: Any, drawn: Any) -> Any:
        return jnp.searchsorted(total, drawn, side="right")

    return (find if p.ndim == 1 else jax.vmap(find))(total, drawn * total[..., -1:]).astype(np.int64)
