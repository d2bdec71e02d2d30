"""Scaled dot-product attention, tiled on CPU so that scores stay in cache.

XLA:CPU writes every score matrix to memory; at 1024 positions that is 2.5 times slower than ATen's flash kernel. One
head at a time, in blocks of queries, is as fast as ATen, and with a causal mask the keys beyond a block are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .axes import peak, total
from .lower_matmul import product
from .lowering import Context, NoLowering
from .platforms import Variants, variants
from .precision import accumulator
from .rule import OpClass, rule

# Scores of all heads up to this size are computed at once; a loop over heads costs more than it saves.
SCORES_BYTES = Variants("attention without a loop over heads", any=math.inf, cpu=4 << 20, why="scores stay in cache")
# Queries per block, and the most blocks that are unrolled (compile time grows with them).
BLOCK = 128
MOST_BLOCKS = 16


def contracted(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Contract one dimension each (counted from the end: 1 or 2); what comes before the last two is batch."""
    batch = tuple(range(a.ndim - 2))
    return product(a, b, (((a.ndim - over_a,), (b.ndim - over_b,)), (batch, batch)))


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array | None, scale: float, first: int | None) -> jax.Array:
    """`q @ k.T * scale + mask`; with `first`, the causal position of the first query, later keys get -inf."""
    s = contracted(q, k, 1, 1) * jnp.asarray(scale, accumulator(q.dtype))
    if mask is not None:
        s = s + mask.astype(s.dtype)
    if first is not None:
        row = lax.broadcasted_iota(jnp.int32, s.shape, s.ndim - 2) + first
        s = jnp.where(row >= lax.broadcasted_iota(jnp.int32, s.shape, s.ndim - 1), s, -jnp.inf)
    return s


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of the scores `s`; a row that may attend to nothing gives 0 and 0, as in ATen."""
    if not s.shape[-1]:
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), s.dtype), jnp.zeros(q.shape[:-1], s.dtype)
    rows = (s.ndim - 1,)
    top = peak(s, rows)
    top = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(s - top)
    sums = total(p, rows)
    none = sums == 0
    sums = jnp.where(none, 1, sums)
    out = contracted(p.astype(v.dtype), v, 1, 2) / sums
    return out, jnp.where(none, 0, top + jnp.log(sums))[..., 0]


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array, scale: float,
    grad: jax.Array, out: jax.Array, lse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    acc = s.dtype
    p = jnp.exp(s - lse[..., None].astype(acc))
    delta = total(grad.astype(acc) * out.astype(acc), (grad.ndim - 1,))
    ds = (p * (contracted(grad, v, 1, 1) - delta) * jnp.asarray(scale, acc)).astype(q.dtype)
    return contracted(ds, k, 1, 2), contracted(ds, q, 2, 2), contracted(p.astype(v.dtype), grad, 2, 2)


def _blocks(queries: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """`(first query, end, keys to look at)` for each block of queries."""
    size = max(BLOCK, -(-queries // MOST_BLOCKS))
    found = []
    for i in range(0, queries, size):
        end = min(i + size, queries)
        found.append((i, end, min(end, keys) if causal else keys))
    return found


class Heads:
    """The common shape of forward and backward: `[B, H, L, E]` operands, whole or head by head."""

    def __init__(self, q: jax.Array, k: jax.Array, mask: jax.Array | None, causal: bool, scale: float | None):
        self.batch, self.heads, self.queries, width = q.shape
        self.keys = k.shape[-2]
        self.groups = self.heads // max(k.shape[1], 1)
        self.mask, self.causal = mask, causal
        if mask is not None:
            self.mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        self.scale = scale if scale is not None else (1 / math.sqrt(width) if width else 1.0)
        size = self.batch * self.heads * self.queries * self.keys * accumulator(q.dtype).itemsize
        self.at_once = size <= SCORES_BYTES.here

    def share(self, x: jax.Array) -> jax.Array:
        """Keys or values, repeated for the query heads that share them."""
        return x if self.groups == 1 else jnp.repeat(x, self.groups, axis=1)

    def gather(self, x: jax.Array) -> jax.Array:
        """The gradient of `share`."""
        if self.groups == 1:
            return x
        return x.reshape(x.shape[0], -1, self.groups, *x.shape[2:]).sum(2)

    def each(self, body: Callable[..., Any], *operands: jax.Array) -> Any:
        """`body(mask of one head, *operands of one head)` for every head; results get `[B, H]` back in front."""

        def one(item: tuple[jax.Array, ...]) -> Any:
            index, *arrays = item
            mask = self.mask
            if mask is not None:
                b = index // self.heads if mask.shape[0] > 1 else 0
                h = index % self.heads if mask.shape[1] > 1 else 0
                mask = jnp.broadcast_to(mask[b, h], (self.queries, self.keys))
            return body(mask, *arrays)

        count = self.batch * self.heads
        flat = [x.reshape(count, *x.shape[2:]) for x in operands]
        results = lax.map(one, (jnp.arange(count, dtype=jnp.int32), *flat))
        return tuple(x.reshape(self.batch, self.heads, *x.shape[1:]) for x in results)

    def scores(self, q: jax.Array, k: jax.Array, mask: jax.Array | None, first: int) -> jax.Array:
        return _scores(q, k, mask, self.scale, first if self.causal else None)


def _part(mask: jax.Array | None, start: int, end: int, keys: int) -> jax.Array | None:
    return None if mask is None else mask[start:end, :keys]


@variants
def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, causal: bool, scale: float | None
) -> tuple[jax.Array, jax.Array]:
    """Attention over `[B, H, L, E]`: the output, and the log-sum-exp `[B, H, L]`, in the accumulator's dtype."""
    run = Heads(q, k, mask, causal, scale)
    k, v = run.share(k), run.share(v)
    if run.at_once:
        return _forward(q, k, v, run.scores(q, k, run.mask, 0))

    def body(mask: Any, q: Any, k: Any, v: Any) -> Any:
        done = []
        for start, end, keys in _blocks(run.queries, run.keys, causal):
            rows, near, values = q[start:end], k[:keys], v[:keys]
            done.append(_forward(rows, near, values, run.scores(rows, near, _part(mask, start, end, keys), start)))
        outs, sums = zip(*done, strict=True)
        # Rounded here, so that the loop over heads stacks half types.
        return jnp.concatenate(outs).astype(q.dtype), jnp.concatenate(sums)

    return run.each(body, q, k, v)


@variants
def attend_backward(
    grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array, mask: jax.Array | None,
    causal: bool, scale: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Gradients of q, k and v."""
    run = Heads(q, k, mask, causal, scale)
    k, v = run.share(k), run.share(v)
    if run.at_once:
        dq, dk, dv = _backward(q, k, v, run.scores(q, k, run.mask, 0), run.scale, grad, out, lse)
        return dq, run.gather(dk), run.gather(dv)
    acc = accumulator(q.dtype)

    def body(mask: Any, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
        dqs, dk, dv = [], jnp.zeros(k.shape, acc), jnp.zeros(v.shape, acc)
        for start, end, keys in _blocks(run.queries, run.keys, causal):
            rows, near, values = q[start:end], k[:keys], v[:keys]
            s = run.scores(rows, near, _part(mask, start, end, keys), start)
            a, b, c = _backward(rows, near, values, s, run.scale, grad[start:end], out[start:end], lse[start:end])
            dqs.append(a.astype(q.dtype))
            dk, dv = (dk + b, dv + c) if keys == run.keys else (dk.at[:keys].add(b), dv.at[:keys].add(c))
        return jnp.concatenate(dqs), dk, dv

    dq, dk, dv = run.each(body, grad, q, k, v, out, lse)
    return dq, run.gather(dk), run.gather(dv)


@rule("_scaled_dot_product_flash_attention_for_cpu.default", OpClass.CONTRACTION)
def flash_for_cpu(
    cx: Context, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    return attend(query, key, value, attn_mask, is_causal, scale)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward.default", OpClass.CONTRACTION)
def flash_for_cpu_backward(
    cx: Context, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float,
    is_causal: bool, *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    return attend_backward(grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale)


@rule("scaled_dot_product_attention.default", OpClass.CONTRACTION)
def scaled_dot_product_attention(
    cx: Context, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Arrives whole only in inference mode."""
    if dropout_p:
        raise NoLowering("attention with dropout draws random numbers")
    spec = cx.out[0]
    lead = spec.shape[:-2]
    if query.ndim < 2 or (enable_gqa and query.ndim < 3):
        raise NoLowering("attention over fewer dimensions than it needs")

    def four(x: Any) -> Any:
        kept = (1,) * max(4 - x.ndim, 0) + x.shape
        wide = (math.prod(kept[:-3]), *kept[-3:])
        return x.reshape(wide)

    if not enable_gqa:
        query, key, value = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (query, key, value))
    elif any(x.shape[:-3] != query.shape[:-3] for x in (key, value)):
        raise NoLowering("grouped heads over batches that broadcast")
    if attn_mask is not None:
        if attn_mask.dtype == jnp.bool_:
            attn_mask = jnp.where(attn_mask, jnp.zeros((), query.dtype), jnp.asarray(-jnp.inf, query.dtype))
        if len(spec.shape) > 4:
            attn_mask = jnp.broadcast_to(attn_mask, (*lead, *attn_mask.shape[-2:]))
            attn_mask = four(attn_mask)
    out = attend(four(query), four(key), four(value), attn_mask, is_causal, scale)[0]
    return out.reshape(spec.shape)
