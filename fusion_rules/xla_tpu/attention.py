"""Attention on TPUs: JAX's own Pallas kernel, forward and backward, which writes no scores to memory.

It takes float32 and bfloat16, and no mask but the causal one. Lengths are filled up to whole blocks; what is filled in
is a segment of its own, which no real token sees. Sequences of several lengths are segments as well. The rest is
computed as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from ..lower_attention import Heads, attend, attend_backward
from ..lower_ragged_attention import Ragged, attend_ragged, attend_ragged_backward
from ..platforms import Variants
from ..precision import matmul_precision

# The scores of one head, in elements, from which on the kernel is used.
LEAST = Variants("scores of a head for the flash kernel", any=0, tpu=1 << 18, why="from 512 x 512 on")
LANES = 128  # of a vector register: blocks are multiples of it, and heads as well, or narrower
BLOCKS = (512, 256, 128)
_FILLED = -1  # the segment of what fills up blocks


def fits(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> bool:
    """Whether the kernel takes such a call, and is worth it."""
    width = q.shape[-1]
    return (
        mask is None
        and q.dtype in (jnp.float32, jnp.bfloat16)
        and v.shape[-1] == width
        and (width < LANES or width % LANES == 0)
        and 0 < LEAST.here <= q.shape[2] * k.shape[2]
    )


class Kernel:
    """JAX's kernel for calls of one shape. `sequences` are the numbers of those that tokens belong to, `[B, L]` and
    `[B, S]`, where these are several."""

    def __init__(
        self, queries: int, keys: int, dtype: Any, causal: bool, scale: float, sequences: Sequence[jax.Array] = ()
    ):
        from jax.experimental.pallas.ops.tpu import flash_attention

        self.module = flash_attention
        self.queries, self.keys = queries, keys
        self.more = -queries % LANES, -keys % LANES
        of_queries, of_keys = (_block(n + more) for n, more in zip((queries, keys), self.more, strict=True))
        self.blocks = flash_attention.BlockSizes(
            block_q=of_queries, block_k_major=of_keys, block_k=of_keys, block_b=1,
            block_q_major_dkv=of_queries, block_q_dkv=of_queries, block_k_major_dkv=of_keys, block_k_dkv=of_keys,
            block_q_dq=of_queries, block_k_major_dq=of_keys, block_k_dq=of_keys,
        )  # fmt: skip
        self.how = causal, scale, self.blocks, False
        self.dtype, self.sequences = dtype, sequences

    def filled(self, x: jax.Array, keys: bool) -> jax.Array:
        """An array `[B, H, L, ...]` with whole blocks."""
        more = self.more[keys]
        return jnp.pad(x, [(0, 0), (0, 0), (0, more), *[(0, 0)] * (x.ndim - 3)]) if more else x

    def segments(self, batch: int) -> Any:
        """Which tokens are real, and of which sequence; None if all are, and of one."""
        if not any(self.more) and not self.sequences:
            return None
        real = self.sequences or [jnp.zeros((batch, n), jnp.int32) for n in (self.queries, self.keys)]
        filled = [((0, 0), (0, more)) for more in self.more]
        made = [jnp.pad(x, more, constant_values=_FILLED) for x, more in zip(real, filled, strict=True)]
        return self.module.SegmentIds(*made)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output and the log-sum-exp."""
        given = self.filled(q, False), self.filled(k, True), self.filled(v, True)
        out, sums, top = self.module._flash_attention(*given, None, self.segments(q.shape[0]), True, *self.how)
        return out[:, :, : self.queries], (top + jnp.log(sums))[:, :, : self.queries]

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any, Any]:
        """The gradients of q, k and v."""
        given = self.filled(q, False), self.filled(k, True), self.filled(v, True)
        out, lse, grad = (self.filled(x, False) for x in (out, lse.astype(jnp.float32), grad))
        # The kernel divides `exp(scores - top)` by the sums; here both are in the log-sum-exp.
        left = (*given, None, self.segments(q.shape[0]), out, jnp.ones_like(lse), lse)
        dq, dk, dv, *_ = self.module._flash_attention_bwd(False, *self.how, left, grad)
        return dq[:, :, : self.queries], dk[:, :, : self.keys], dv[:, :, : self.keys]

    def call(self, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """One of these, as `exactly` traces it."""
        return exactly(function, self.dtype, *arrays)


def exactly(function: Callable[..., Any], dtype: Any, *arrays: jax.Array) -> Any:
    """What a function of a Pallas kernel makes of arrays, traced without 64-bit numbers, which Mosaic does not have.

    Products of float32 are exact as elsewhere: Mosaic has all passes, or one.
    """
    exact = dtype == jnp.float32 and matmul_precision() != jax.lax.Precision.DEFAULT
    with jax.enable_x64(False), jax.default_matmul_precision("highest" if exact else "default"):
        traced, form = jax.make_jaxpr(function, return_shape=True)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(form), jaxpr_as_fun(traced)(*arrays))


def _ragged(call: Ragged, q: jax.Array, k: jax.Array, scale: float | None) -> tuple[Heads, Kernel]:
    causal = call.window[1] is not None
    heads = Heads(q, k, None, causal, scale)
    sequences = [jnp.where(x.real, x.of, none).astype(jnp.int32) for x, none in ((call.queries, -2), (call.keys, -3))]
    return heads, Kernel(heads.queries, heads.keys, q.dtype, causal, heads.scale, sequences)


def _takes(call: Ragged, q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether the kernel's causal mask, which is one of places, is the call's."""
    left, right = call.window
    return fits(q, k, v, None) and left is None and (right is None or (right == 0 and call.alike))


@attend_ragged.on("tpu")
def flash_ragged(call: Ragged, q: Any, k: Any, v: Any, scale: float | None) -> Any:
    """JAX's flash attention with a segment for each sequence; windows and paged caches as everywhere"""
    if not _takes(call, q, k, v):
        return attend_ragged.any(call, q, k, v, scale)
    heads, kernel = _ragged(call, q, k, scale)
    out, lse = kernel.call(kernel.forward, q, heads.share(k), heads.share(v))
    return jnp.where(call.sees[..., None], out, jnp.zeros((), out.dtype)), jnp.where(call.sees, lse, jnp.inf)


@attend_ragged_backward.on("tpu")
def flash_ragged_backward(
    call: Ragged, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float | None
) -> Any:
    """The derivative of JAX's flash attention with segments; windows as everywhere"""
    if not _takes(call, q, k, v):
        return attend_ragged_backward.any(call, grad, q, k, v, out, lse, scale)
    heads, kernel = _ragged(call, q, k, scale)
    dq, dk, dv = kernel.call(kernel.backward, grad.astype(q.dtype), q, heads.share(k), heads.share(v), out, lse)
    return dq, heads.gather(dk), heads.gather(dv)


def _block(n: int) -> int:
    return next(size for size in BLOCKS if n % size == 0)


@attend.on("tpu")
def flash(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """JAX's flash attention, a Pallas kernel; scores of few tokens as everywhere"""
    if not fits(q, k, v, mask):
        return attend.any(q, k, v, mask, causal, scale)
    heads = Heads(q, k, mask, causal, scale)
    kernel = Kernel(heads.queries, heads.keys, q.dtype, causal, heads.scale)
    return kernel.call(kernel.forward, q, heads.share(k), heads.share(v))


@attend_backward.on("tpu")
def flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any, causal: bool, scale: float | None
) -> Any:
    """The derivative of JAX's flash attention; scores of few tokens as everywhere"""
    if not fits(q, k, v, mask):
        return attend_backward.any(grad, q, k, v, out, lse, mask, causal, scale)
    heads = Heads(q, k, mask, causal, scale)
    kernel = Kernel(heads.queries, heads.keys, q.dtype, causal, heads.scale)
    dq, dk, dv = kernel.call(kernel.backward, grad.astype(q.dtype), q, heads.share(k), heads.share(v), out, lse)
    return dq, heads.gather(dk), heads.gather(dv)
