"""Attention on TPUs: JAX's own Pallas kernel, forward and backward, which writes no scores to memory.

It takes float32 and bfloat16, and no mask but the causal one. Lengths are filled up to whole blocks; what is filled in
is a segment of its own, which no real token sees. Sequences of several lengths are segments as well (`ragged`). The
rest is computed as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..lower_attention import Heads, attend, attend_backward
from ..platforms import Variants
from .kernels import LANES, block, exactly, filled_up

# The scores of one head, in elements, from which on the kernel is used.
LEAST = Variants("scores of a head for the flash kernel", any=0, tpu=1 << 18, why="from 512 x 512 on")
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
    `[B, S]`, where these are several. It has as many heads of keys as of queries."""

    grouped = False

    def __init__(
        self, queries: int, keys: int, causal: bool, scale: float, sequences: Sequence[jax.Array] = ()
    ):
        from jax.experimental.pallas.ops.tpu import flash_attention

        self.module = flash_attention
        self.queries, self.keys = queries, keys
        self.lengths = [n + -n % LANES for n in (queries, keys)]
        of_queries, of_keys = map(block, self.lengths)
        self.blocks = flash_attention.BlockSizes(
            block_q=of_queries, block_k_major=of_keys, block_k=of_keys, block_b=1,
            block_q_major_dkv=of_queries, block_q_dkv=of_queries, block_k_major_dkv=of_keys, block_k_dkv=of_keys,
            block_q_dq=of_queries, block_k_major_dq=of_keys, block_k_dq=of_keys,
        )  # fmt: skip
        self.how = causal, scale, self.blocks, False
        self.sequences = sequences

    def filled(self, x: jax.Array, keys: bool) -> jax.Array:
        """An array `[B, H, L, ...]` with whole blocks."""
        return filled_up(x, 2, self.lengths[keys])

    def segments(self, batch: int) -> Any:
        """Which tokens are real, and of which sequence; None if all are, and of one."""
        if self.lengths == [self.queries, self.keys] and not self.sequences:
            return None
        real = self.sequences or [jnp.zeros((batch, n), jnp.int32) for n in (self.queries, self.keys)]
        made = [filled_up(x, 1, length, _FILLED) for x, length in zip(real, self.lengths, strict=True)]
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


@attend.on("tpu")
def flash(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """JAX's flash attention, a Pallas kernel; scores of few tokens as everywhere"""
    if not fits(q, k, v, mask):
        return attend.any(q, k, v, mask, causal, scale)
    heads = Heads(q, k, mask, causal, scale)
    kernel = Kernel(heads.queries, heads.keys, causal, heads.scale)
    return exactly(kernel.forward, q.dtype, q, heads.share(k), heads.share(v))


@attend_backward.on("tpu")
def flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any, causal: bool, scale: float | None
) -> Any:
    """The derivative of JAX's flash attention; scores of few tokens as everywhere"""
    if not fits(q, k, v, mask):
        return attend_backward.any(grad, q, k, v, out, lse, mask, causal, scale)
    heads = Heads(q, k, mask, causal, scale)
    kernel = Kernel(heads.queries, heads.keys, causal, heads.scale)
    dq, dk, dv = exactly(
        kernel.backward, q.dtype, grad.astype(q.dtype), q, heads.share(k), heads.share(v), out, lse
    )  # fmt: skip
    return dq, heads.gather(dk), heads.gather(dv)
