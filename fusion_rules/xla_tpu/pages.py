"""Attention over a cache of pages on TPUs: a Pallas kernel that fetches the pages that a table names, and no others.

JAX's own two kernels want caches of another form than torch's `[pages, size, heads, width]`: with heads in front, or
with keys and values alternating. To bring a cache into that form moves more bytes than attention does. So this kernel
goes through the pages as they are. The keys of all heads in them are one matrix, of which each query sees those of its
head: decoding waits for memory, not for products. Values that are not finite are left out of that matrix, for zero
times them is not zero, and added for those who see them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..lower_attention import Heads
from ..lower_ragged_attention import Ragged, attend_pages
from .kernel_costs import seldom
from .kernels import LANES, exactly

ROWS = 512  # most rows of queries of one sequence, all heads together
KEYS = 1024  # keys of all heads that a step goes through, if one page has no more
MOST_KEYS = 4096
MOST_PAGES = 16  # that a step takes: each is an operand
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def _pages(keys: int, table: int) -> int:
    """How many pages, of so many keys of all heads each, a step takes; 0 if none can be."""
    fitting = [n for n in range(1, min(KEYS // keys or 1, MOST_PAGES, table) + 1) if n * keys % LANES == 0]
    return max(fitting, default=0) if keys <= MOST_KEYS else 0


def fits(q: jax.Array, pages: jax.Array, table: jax.Array) -> bool:
    """Whether the kernel takes queries `[B, H, L, E]`."""
    width, keys = q.shape[-1], pages.shape[1] * pages.shape[2]
    return (
        q.dtype in (jnp.float32, jnp.bfloat16)
        and pages.dtype == q.dtype
        and (width < LANES or width % LANES == 0)
        and 0 < q.shape[1] * q.shape[2] <= ROWS
        and keys % 16 == 0  # rows of a packed tile
        and pages.size > 0
        and _pages(keys, table.shape[1]) > 0
    )


def _kernel(
    count: int, size: int, of: Any, used: Any, q: Any, first: Any, last: Any, head: Any, keys: Any, *rest: Any
) -> None:  # fmt: skip
    """One step: `count` pages of one sequence. `of` is the table, `used` the number of keys; `first` and `last` are
    what each row sees, `head` its head of keys; `keys` are the head and the place of each key in the step."""
    from jax.experimental import pallas as pl

    (k, v), (out, lse, top, total, acc) = (rest[:count], rest[count : 2 * count]), rest[2 * count :]
    sequence, step = pl.program_id(0), pl.program_id(1)

    def product(left: Any, right: Any, dtype: Any) -> Any:
        return jax.lax.dot_general(
            left.astype(dtype), right.astype(dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    @pl.when(step == 0)
    def _() -> None:
        top[...] = jnp.full_like(top, _MASKED)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(step * count * size < used[sequence])
    def _() -> None:
        k_all, v_all = (jnp.concatenate([ref[0] for ref in refs]) for refs in (k, v))
        columns = k_all.shape[0]
        scores = jax.lax.dot_general(q[0], k_all, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        place = keys[1:2] + step * count * size
        seen = (head[:, :1] == keys[:1]) & (first[0][:, :1] <= place) & (place <= last[0][:, :1])
        scores = jnp.where(seen, scores, _MASKED)
        before = top[:, :1]
        now = jnp.maximum(before, jnp.max(scores, 1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - now), 0.0)
        faded = jnp.exp(before - now)
        # What of a page is not used yet may hold anything, and zero times that is not zero.
        at = jax.lax.broadcasted_iota(jnp.int32, (columns, 1), 0)
        real = at < (used[sequence] - step * count * size) * (columns // (count * size))
        values = jnp.where(real, v_all.astype(jnp.float32), 0.0)
        wild = ~(jnp.abs(values) < jnp.inf)
        acc[...] = acc[...] * faded + product(weights, jnp.where(wild, 0.0, values), v_all.dtype)

        def add_wild() -> None:
            for end in (jnp.inf, -jnp.inf):  # NaN is both
                met = product(seen.astype(jnp.float32), (wild & ~(values == -end)).astype(jnp.float32), v_all.dtype)
                acc[...] = acc[...] + jnp.where(met > 0, end, 0.0)

        pl.when(jnp.max(wild.astype(jnp.float32)) > 0)(seldom(add_wild))
        total[...] = jnp.broadcast_to(total[:, :1] * faded + jnp.sum(weights, 1, keepdims=True), total.shape)
        top[...] = jnp.broadcast_to(now, top.shape)

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        whole = jnp.where(total[...] == 0, 1.0, total[...])
        out[0] = (acc[...] / whole[:, :1]).astype(out.dtype)
        lse[0] = top[...] + jnp.log(whole)


def paged(
    q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, used: jax.Array, first: jax.Array, last: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Queries `[B, H, L, E]` over pages `[pages, size, K, E]`. `table` `[B, n]` names those of each sequence, which has
    `used` keys; each query sees the places from `first` to `last`, `[B, L]`. The output, and the log-sum-exp."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, heads, queries, width = q.shape
    number, size, shared, _ = k.shape
    rows, keys, most = heads * queries, size * shared, table.shape[1]
    count = _pages(keys, most)
    q = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(batch, rows, width)
    table = jnp.clip(table.astype(jnp.int32), 0, number - 1)
    used = jnp.minimum(used.astype(jnp.int32), most * size)
    first, last = first.astype(jnp.int32), jnp.minimum(last.astype(jnp.int32), used[:, None] - 1)
    bounds = [
        jnp.broadcast_to(x[:, None, :, None], (batch, heads, queries, LANES)).reshape(batch, rows, LANES)
        for x in (first, last)
    ]
    head = jnp.broadcast_to((jnp.arange(rows, dtype=jnp.int32) // (rows // shared))[:, None], (rows, LANES))
    at = jnp.arange(count * keys, dtype=jnp.int32)
    columns = jnp.concatenate([(at % shared)[None], (at // shared)[None], jnp.zeros((6, count * keys), jnp.int32)])

    def page(n: int) -> Any:
        def place(b: Any, i: Any, table: Any, used: Any) -> Any:
            # Beyond the last page that is used it stays, so that nothing is fetched.
            last = jnp.maximum(jax.lax.div(used[b] + size - 1, size), 1) - 1
            return table[b, jnp.minimum(i * count + n, last)], 0, 0

        return pl.BlockSpec((1, keys, width), place)

    def of_sequence(*shape: int) -> Any:
        return pl.BlockSpec((1, *shape), lambda b, i, table, used: (b, 0, 0))

    def always(*shape: int) -> Any:
        return pl.BlockSpec(shape, lambda b, i, table, used: (0, 0))

    pages = [page(n) for n in range(count)]
    out, lse = pl.pallas_call(
        lambda *refs: _kernel(count, size, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, pl.cdiv(most, count)),
            in_specs=[
                of_sequence(rows, width), of_sequence(rows, LANES), of_sequence(rows, LANES), always(rows, LANES),
                always(8, count * keys), *pages, *pages,
            ],
            out_specs=[of_sequence(rows, width), of_sequence(rows, LANES)],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32), pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, width), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        out_shape=[
            jax.ShapeDtypeStruct((batch, rows, width), q.dtype), jax.ShapeDtypeStruct((batch, rows, LANES), jnp.float32)
        ],
        name="attention_over_pages",
    )(
        table, used, q, *bounds, head, columns,
        *[x.reshape(number, keys, width) for x in (k, v) for _ in range(count)],
    )  # fmt: skip
    return out.reshape(batch, heads, queries, width), lse[..., 0].reshape(batch, heads, queries)


@attend_pages.on("tpu")
def attend_pages_in_place(call: Ragged, q: Any, k: Any, v: Any, table: Any, scale: float | None) -> Any:
    """A Pallas kernel that fetches the pages that a table names; many queries of one sequence as everywhere"""
    if not fits(q, k, table):
        return attend_pages.any(call, q, k, v, table, scale)
    how = Heads(q, k.swapaxes(1, 2), None, False, scale)
    given = q, k, v, table, call.keys.lengths, *call.bounds
    out, lse = exactly(functools.partial(paged, scale=how.scale), q.dtype, *given)
    return jnp.where(call.sees[..., None], out, jnp.zeros((), out.dtype)), jnp.where(call.sees, lse, jnp.inf)
