"""Attention within a window on TPUs: JAX's own Pallas kernel for masks that are known (`splash_attention`), forward and
backward, which looks at those blocks alone in which something is seen.

What is seen is a band of places: key `j` by query `i` where `i + shift - left <= j <= i + shift + right`. The kernel
asks for the blocks to go to, and for a function of places that says what is seen in them. Heads may be grouped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .kernels import LANES, block, filled_up

# The widest blocks. Half of what a block of queries goes through lies outside of a window that is as wide as a block.
WIDEST = 512


@dataclass(frozen=True)
class Band:
    """What a query sees, of places. A bound that is None holds nothing back."""

    left: int | None
    right: int | None
    shift: int

    def seen(self, queries: Any, keys: Any) -> Any:
        """Whether the queries at some places see the keys at others: the kernel's mask function, of equal shapes."""
        queries = queries + self.shift
        after = True if self.left is None else queries - self.left <= keys
        return after if self.right is None else after & (queries + self.right >= keys)

    def blocks(self, queries: int, keys: int, of_queries: int, of_keys: int) -> np.ndarray:
        """In which blocks something is seen, `[L / of_queries, S / of_keys]`, of lengths that are whole blocks."""
        q = np.arange(0, queries, of_queries)[:, None] + self.shift
        k = np.arange(0, keys, of_keys)[None]
        # How far keys stand ahead of queries in a block: all whole numbers from the least to the most.
        least, most = k - (q + of_queries - 1), k + of_keys - 1 - q
        after = np.full(least.shape, True) if self.left is None else most >= -self.left
        return after if self.right is None else after & (least <= self.right)


def _gone_to(seen: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks the kernel goes to along an axis of `[L blocks, S blocks]`, and whether it computes there: as many
    for each as for the one that has most of them. The rest is its last one again, which is not fetched anew."""
    seen = seen.swapaxes(axis, 1)
    most = max(int(seen.sum(1).max()), 1)
    order = np.argsort(~seen, axis=1, kind="stable")[:, :most]
    runs = np.arange(most) < seen.sum(1)[:, None]
    last = order[np.arange(len(order)), np.maximum(seen.sum(1) - 1, 0)]
    goes = np.where(runs, order, last[:, None])
    return tuple(x.swapaxes(axis, 1).astype(np.int32)[None] for x in (goes, runs))  # type: ignore[return-value]


class Kernel:
    """JAX's kernel for calls of one shape, `[B, H, L, E]` and `[B, K, S, E]`.

    `segments` are the numbers of the sequences that places belong to, `[B, L]` and `[B, S]`; a negative one sees
    nothing, and nothing sees it.
    """

    grouped = True

    def __init__(self, queries: int, keys: int, band: Band, scale: float, segments: Sequence[jax.Array]):
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask_info

        self.module, self.info = splash_attention_kernel, splash_attention_mask_info.MaskInfo
        self.queries, self.keys, self.band, self.scale = queries, keys, band, scale
        self.lengths = [n + -n % LANES for n in (queries, keys)]
        width = math.inf if band.left is None or band.right is None else band.left + band.right
        widest = max(LANES, min(WIDEST, 1 << math.ceil(math.log2(width + 1)) if width < WIDEST else WIDEST))
        self.blocks = [block(n, widest) for n in self.lengths]
        self.seen = band.blocks(*self.lengths, *self.blocks)
        filled = [filled_up(x, 1, n, none) for x, n, none in zip(segments, self.lengths, (-2, -3), strict=True)]
        self.segments = self.module.SegmentIds(*filled)

    def _mask(self, axis: int) -> Any:
        goes, runs = map(jnp.asarray, _gone_to(self.seen, axis))
        return self.info(goes, None, runs, None, np.arange(self.lengths[0], dtype=np.int32))

    def _sizes(self) -> Any:
        q, k = self.blocks
        return self.module.BlockSizes(q, k, k, block_q_dkv=q, block_kv_dkv=k, block_q_dq=q, block_kv_dq=k)

    def _filled(self, x: jax.Array, of_keys: bool) -> jax.Array:
        return filled_up(x, 2, self.lengths[of_keys])

    def _scaled(self, q: jax.Array) -> jax.Array:
        """The kernel has no scale of scores, so that queries are scaled."""
        return (q.astype(jnp.float32) * self.scale).astype(q.dtype)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output, and the log-sum-exp `[B, H, L]`. What a query that sees nothing gets is not said."""

        def each(q: Any, k: Any, v: Any, segments: Any) -> Any:
            out, (lse,) = self.module._splash_attention_forward(
                self._mask(1), q, k, v, segments, None, self.module.DEFAULT_MASK_VALUE, False, self._sizes(), None,
                True, self.band.seen,
            )  # fmt: skip
            return out, lse

        given = self._filled(self._scaled(q), False), self._filled(k, True), self._filled(v, True)
        out, lse = jax.vmap(each)(*given, self.segments)
        return out[:, :, : self.queries], lse[:, :, : self.queries]

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any, Any]:
        """The gradients of q, k and v. The log-sum-exp of a query that sees nothing is infinite."""
        how = dict(
            mask_value=self.module.DEFAULT_MASK_VALUE, is_mqa=False, attn_logits_soft_cap=None,
            mask_function=self.band.seen, interpret=False,
            **{f"{x}_layout": self.module.QKVLayout.HEAD_DIM_MINOR for x in "qkv"},
        )  # fmt: skip
        of_queries, of_keys = self.blocks

        def each(q: Any, k: Any, v: Any, segments: Any, lse: Any, grad: Any, delta: Any) -> Any:
            given = q, k, v, segments, None, lse, grad, delta
            blocks = {"bq": of_queries, "bkv": of_keys}
            dq = self.module._splash_attention_bwd_dq(*given, mask_info=self._mask(1), **blocks, **how)
            _, dk, dv = self.module._splash_attention_bwd_dkv(
                *given, mask_info=self._mask(0), bkv_compute=of_keys, use_fused_bwd_kernel=False, **blocks, **how
            )  # fmt: skip
            return dq, dk, dv

        delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), -1)
        given = self._filled(self._scaled(q), False), self._filled(k, True), self._filled(v, True)
        rest = [self._filled(x, False) for x in (lse.astype(jnp.float32), grad, delta)]
        dq, dk, dv = jax.vmap(each)(*given, self.segments, *rest)
        dq = (dq.astype(jnp.float32) * self.scale).astype(q.dtype)
        return dq[:, :, : self.queries], dk[:, :, : self.keys], dv[:, :, : self.keys]
