"""Attention over sequences of several lengths in one batch: torch's flash attention (`varlen_attn`), paged caches too.

Tokens of all sequences stand one after the other, `[tokens, heads, width]`, and cumulative lengths say where each
begins. XLA has no ragged arrays, so sequences are laid out in rows, one for each sequence, filled up to the longest; or
all in one row, where that is less. What a token may see is a mask; it is made of positions within the sequence, and
counted from its end where queries and keys differ in number, as FlashAttention 2 does (Dao, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .elementwise import need
from .lower_attention import attend, attend_backward
from .lowering import Context
from .platforms import Variants, variants
from .rule import OpClass, rule

# How many times the scores of one long row those of a row for each sequence may be, where only these are a band.
AT_END = Variants("scores in rows for one in a single row", any=1, tpu=4, why="the splash kernel's mask is of places")


@dataclass(frozen=True)
class Rows:
    """How tokens are laid out in rows `[B, L]`, and which sequence and position each place has.

    `token` is what stands at a place, `real` whether anything does. `row` and `column` say where each token stands.
    `of` is the sequence of a place, `lengths` the tokens of each sequence.
    """

    token: jax.Array
    real: jax.Array
    of: jax.Array
    position: jax.Array
    row: jax.Array
    column: jax.Array
    lengths: jax.Array

    def lay(self, x: jax.Array) -> jax.Array:
        """`[tokens, H, ...]` to `[B, H, L, ...]`, with zeros where nothing stands: what is masked may be NaN."""
        found = jnp.take(x, self.token, axis=0, mode="clip")
        real = self.real.reshape(*self.real.shape, *(1,) * (found.ndim - 2))
        return jnp.where(real, found, jnp.zeros((), x.dtype)).swapaxes(1, 2)

    def collect(self, x: jax.Array, missing: float = 0) -> jax.Array:
        """`[B, H, L, ...]` back to `[tokens, H, ...]`; a token of no sequence gets `missing`."""
        last = jnp.clip(self.column, 0, x.shape[2] - 1)
        found = x[self.row, :, last]
        is_there = (self.row >= 0) & (self.column == last) & self.real[self.row, last]
        return jnp.where(is_there.reshape(-1, *(1,) * (found.ndim - 1)), found, jnp.asarray(missing, x.dtype))


def _rows(starts: jax.Array, lengths: jax.Array, tokens: int, longest: int, in_one: bool, at_end: bool) -> Rows:
    """Rows of sequences that begin at `starts`; with `in_one` a single row has them all. With `at_end` a row is filled
    up in front, and its sequence stands at its end."""
    at = jnp.arange(tokens, dtype=starts.dtype)
    row = jnp.searchsorted(starts, at, side="right").astype(starts.dtype) - 1
    column = at - starts[row]
    if in_one:
        of, position, token = row[None], column[None], at[None]
        return Rows(token, position < lengths[of], of, position, jnp.zeros_like(row), at, lengths)
    of = jnp.broadcast_to(jnp.arange(len(lengths), dtype=starts.dtype)[:, None], (len(lengths), longest))
    position = jnp.broadcast_to(jnp.arange(longest, dtype=starts.dtype), of.shape)
    if at_end:
        free = (longest - lengths).astype(starts.dtype)
        position, column = position - free[:, None], column + free[row]
    real = (position >= 0) & (position < lengths[of])
    return Rows(starts[of] + position, real, of, position, row, column, lengths)


@dataclass(frozen=True)
class Ragged:
    """A call: queries and keys in rows, and what each query sees. A bound of `window` that is None holds nothing back.

    The query at place `i` of a row stands at the key at place `i + shift` of it. So what it sees is a matter of places.
    `shift` is None where it differs from sequence to sequence."""

    queries: Rows
    keys: Rows
    window: tuple[int | None, int | None]
    shift: int | None

    @property
    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """The first and the last position of the keys that each query sees, `[B, L]`."""
        q, (left, right) = self.queries, self.window
        keys = self.keys.lengths[q.of]
        # The last query of a sequence stands at its last key.
        here = q.position + keys - q.lengths[q.of]
        first = jnp.zeros_like(here) if left is None else jnp.maximum(here - left, 0)
        return first, keys - 1 if right is None else jnp.minimum(here + right, keys - 1)

    @property
    def sees(self) -> jax.Array:
        """Whether a query sees anything, `[B, 1, L]`."""
        first, last = self.bounds
        return (self.queries.real & (first <= last))[:, None]

    @property
    def mask(self) -> jax.Array:
        """What is added to scores, `[B, 1, L, S]`."""
        q, k = self.queries, self.keys
        first, last = (x[:, :, None] for x in self.bounds)
        there = (q.of[:, :, None] == k.of[:, None]) & q.real[:, :, None] & k.real[:, None]
        there &= (k.position[:, None] >= first) & (k.position[:, None] <= last)
        return jnp.where(there, 0.0, -jnp.inf).astype(jnp.float32)[:, None]


@variants
def attend_ragged(call: Ragged, q: jax.Array, k: jax.Array, v: jax.Array, scale: float | None) -> Any:
    """Attention of a ragged call over `[B, H, L, E]`: the output, and the log-sum-exp `[B, H, L]`; 0 and infinity for
    a query that sees nothing."""
    out, lse = attend(q, k, v, call.mask, False, scale)
    return out, jnp.where(call.sees, lse, jnp.inf)


@variants
def attend_ragged_backward(
    call: Ragged, grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array,
    scale: float | None,
) -> Any:  # fmt: skip
    """Gradients of q, k and v."""
    return attend_backward(grad, q, k, v, out, lse, call.mask, False, scale)


@variants
def attend_pages(
    call: Ragged, q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, scale: float | None
) -> Any:
    """Attention of a ragged call whose keys and values are pages `[pages, size, K, E]`, of which a table `[B, n]` names
    those of each sequence: queries `[B, H, L, E]`, and results as those of `attend_ragged`."""
    k, v = (call.keys.lay(x.reshape(-1, *x.shape[2:])) for x in (k, v))
    return attend_ragged(call, q, k, v, scale)


def _bound(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _call(
    query: Any, key: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, is_causal: bool, left: int | None,
    right: int | None, seqused_k: Any = None, block_table: Any = None,
) -> Ragged:  # fmt: skip
    """What the arguments of torch's op say."""
    number = cum_seq_q.shape[0] - 1
    starts = cum_seq_q[:-1]
    lengths = cum_seq_q[1:] - starts
    paged = block_table is not None
    tokens = query.shape[0], key.shape[0]
    wide = block_table.shape[1] * key.shape[1] if paged else max_k
    window = _bound(left), 0 if is_causal else _bound(right)
    alike = cum_seq_q is cum_seq_k and seqused_k is None
    # Where queries and keys differ in number, the last ones stand at one place in all rows, and not the first.
    at_end = not (alike or paged or window == (None, None))
    most = tokens[0] * tokens[1] * (AT_END.here if at_end else 1)
    in_one = not paged and seqused_k is None and number * max_q * max_k > most
    at_end &= not in_one
    queries = _rows(starts, lengths, tokens[0], max_q, in_one, at_end)
    if paged:
        need(seqused_k is not None, "its pages come without lengths")
        page = key.shape[1]
        place = jnp.broadcast_to(jnp.arange(wide, dtype=block_table.dtype), (number, wide))
        token = jnp.take_along_axis(block_table, place // page, 1) * page + place % page
        of = jnp.broadcast_to(jnp.arange(number, dtype=block_table.dtype)[:, None], place.shape)
        used = seqused_k.astype(place.dtype)
        keys = Rows(token, place < used[:, None], of, place, of[:, 0], of[:, 0], used)
    else:
        need(cum_seq_k is not None, "its keys come without lengths")
        of_keys = cum_seq_k[1:] - cum_seq_k[:-1] if seqused_k is None else seqused_k.astype(cum_seq_k.dtype)
        keys = _rows(cum_seq_k[:-1], of_keys, tokens[1], wide, in_one, at_end)
    return Ragged(queries, keys, window, wide - max_q if at_end else 0 if alike else None)


@rule("_flash_attention_forward.default", OpClass.CONTRACTION, defines=True)
def flash_attention(
    cx: Context, query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Any = None,
    alibi_slopes: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    need(not dropout_p and not return_debug_mask and alibi_slopes is None, "it has dropout, or biases by distance")
    need(cum_seq_q is not None and query.ndim == 3, "its sequences are of one length")
    rest = [jnp.zeros(spec.shape, jnp.uint64) for spec in cx.out[2:4]]
    rest.append(jnp.zeros(cx.out[4].shape, query.dtype))
    if not (query.size and key.size and max_q and max_k):
        return jnp.zeros_like(query), jnp.full(query.shape[1::-1], jnp.inf, jnp.float32), *rest
    call = _call(query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right,
                 seqused_k, block_table)  # fmt: skip
    rows = call.queries.lay(query)
    if block_table is not None:
        out, lse = attend_pages(call, rows, key, value, block_table, scale)
    else:
        out, lse = attend_ragged(call, rows, call.keys.lay(key), call.keys.lay(value), scale)
    sums = call.queries.collect(lse.astype(jnp.float32), jnp.inf).T
    return call.queries.collect(out).astype(query.dtype), sums, *rest


@rule("_flash_attention_backward.default", OpClass.CONTRACTION, defines=True)
def flash_attention_backward(
    cx: Context, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> Any:  # fmt: skip
    need(not dropout_p, "it has dropout")
    need(cum_seq_q is not None and query.ndim == 3, "its sequences are of one length")
    if not (query.size and key.size and max_q and max_k):
        return tuple(map(jnp.zeros_like, (query, key, value)))
    call = _call(query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right)
    queries, keys = call.queries, call.keys
    given = queries.lay(grad_out), queries.lay(query), keys.lay(key), keys.lay(value), queries.lay(out)
    dq, dk, dv = attend_ragged_backward(call, *given, queries.lay(logsumexp.T), scale)
    return queries.collect(dq), keys.collect(dk), keys.collect(dv)
