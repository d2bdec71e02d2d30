"""Products of groups of rows, as in mixtures of experts (`_grouped_mm`), and of scaled eight-bit matrices.

Which rows are a group's is known only when the program runs: they end at its offset and begin at that of the group
before. They are computed block by block, so that beside them no more is computed than the rest of one block a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from .elementwise import need
from .lower_matmul import BMM, MM, product
from .lowering import Context
from .platforms import variants
from .precision import accumulator
from .rule import OpClass, rule

BLOCK = 128  # rows
# Sums over the first axis of both operands, of which a block is taken.
_ROWS_SUMMED = (((0,), (0,)), ((), ()))


def _bounds(offsets: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The first row of each group, and the one after its last."""
    ends = jnp.clip(offsets.astype(jnp.int32), 0, rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]), ends


def _over_blocks(offsets: jax.Array, rows: int, block: int, first: Any, step: Callable[..., Any]) -> Any:
    """`step(made, group, start, valid)` for each block of each group's rows in turn, beginning with `first`; `valid`
    says which rows of the block are the group's. As in eager, a group whose offset is below the one before is empty."""
    starts, ends = _bounds(offsets, rows)

    def of_group(group: Any, made: Any) -> Any:
        end = ends[group]

        def of_block(state: Any) -> Any:
            start, made = state
            return start + block, step(made, group, start, start + jnp.arange(block, dtype=jnp.int32) < end)

        return lax.while_loop(lambda state: state[0] < end, of_block, (starts[group], made))[1]

    return lax.fori_loop(0, offsets.shape[0], of_group, first)


def _filled(x: jax.Array, block: int) -> jax.Array:
    """With a block more, so that one may begin at any row."""
    return jnp.pad(x, [(0, block), *[(0, 0)] * (x.ndim - 1)])


@variants
def rows_by_groups(x: jax.Array, weights: jax.Array, offsets: jax.Array) -> jax.Array:
    """`x[M, K]` times the matrix of each row's group, of `weights[G, K, N]`; 0 for rows of no group. Not rounded."""
    rows, block = x.shape[0], min(BLOCK, x.shape[0])
    given = _filled(x, block)

    def step(made: jax.Array, group: Any, start: Any, valid: jax.Array) -> jax.Array:
        new = product(lax.dynamic_slice_in_dim(given, start, block), weights[group], MM)
        before = lax.dynamic_slice_in_dim(made, start, block)
        return lax.dynamic_update_slice_in_dim(made, jnp.where(valid[:, None], new, before), start, 0)

    first = jnp.zeros((rows + block, weights.shape[2]), accumulator(x.dtype))
    return _over_blocks(offsets, rows, block, first, step)[:rows]


@variants
def sums_by_groups(x: jax.Array, y: jax.Array, offsets: jax.Array) -> jax.Array:
    """For each group, the product of `x[M, K]` transposed and `y[M, N]` over its rows: `[G, K, N]`. Not rounded."""
    rows, block = x.shape[0], min(BLOCK, x.shape[0])
    left, right = _filled(x, block), _filled(y, block)

    def step(made: jax.Array, group: Any, start: Any, valid: jax.Array) -> jax.Array:
        a, b = (
            jnp.where(valid[:, None], lax.dynamic_slice_in_dim(t, start, block), jnp.zeros((), t.dtype))
            for t in (left, right)
        )
        return made.at[group].add(product(a, b, _ROWS_SUMMED))

    first = jnp.zeros((offsets.shape[0], x.shape[1], y.shape[1]), accumulator(x.dtype))
    return _over_blocks(offsets, rows, block, first, step)


@rule("_grouped_mm.default", OpClass.CONTRACTION)
def grouped_mm(cx: Context, self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    need(bias is None, "it has a bias")
    return _grouped(cx, self, mat2, offs)


def _grouped(cx: Context, self: Any, mat2: Any, offs: Any) -> jax.Array:
    if self.ndim == mat2.ndim == 3:
        return product(self, mat2, BMM)
    need(offs is not None, "it has no offsets")
    if not self.size or not mat2.size or not offs.size:
        return jnp.zeros(cx.out[0].shape, accumulator(self.dtype))
    if self.ndim == 2 and mat2.ndim == 3:
        return rows_by_groups(self, mat2, offs)
    if self.ndim == 3:  # the groups are of columns
        return rows_by_groups(mat2.T, self.swapaxes(1, 2), offs).T
    return sums_by_groups(self.T, mat2, offs)


@rule("_scaled_grouped_mm.default", OpClass.CONTRACTION, defines=True)
def scaled_grouped_mm(
    cx: Context,
    self: Any,
    mat2: Any,
    scale_a: Any,
    scale_b: Any,
    offs: Any = None,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    need(bias is None and scale_result is None, "it has a bias, or its result is scaled")
    need(scale_a.dtype == scale_b.dtype == jnp.float32, "its scales are of blocks")
    made = _grouped(cx, self.astype(jnp.bfloat16), mat2.astype(jnp.bfloat16), offs).astype(jnp.float32)
    if offs is not None and self.ndim == mat2.ndim:  # sums over the rows of groups, each with scales of its own
        scale_a, scale_b = (scale.reshape(offs.shape[0], -1) for scale in (scale_a, scale_b))
    elif self.ndim == 2:
        scale_b = scale_b[_group_of(offs, self.shape[0])]
        return made * scale_a[:, None] * scale_b
    elif mat2.ndim == 2:
        scale_a = scale_a[_group_of(offs, mat2.shape[1])]
        return made * scale_a.T * scale_b
    return made * scale_a[:, :, None] * scale_b[:, None]


def _group_of(offsets: jax.Array, rows: int) -> jax.Array:
    """The group of each row: the last one that has it, as products of groups overwrite each other. What is of none is
    not looked at."""
    starts, ends = (x[:, None] for x in _bounds(offsets, rows))
    row = jnp.arange(rows, dtype=jnp.int32)
    return offsets.shape[0] - 1 - jnp.argmax(((starts <= row) & (row < ends))[::-1], 0)


def _scaled(x: jax.Array, y: jax.Array, scales: Sequence[jax.Array], bias: Any) -> jax.Array:
    """`x @ y` of eight-bit numbers, times scales of the whole, of rows or of columns."""
    need(all(t.dtype.name.startswith("float8") for t in (x, y)), "it is none of eight-bit floats")
    # bfloat16 holds each of them, and float32 each product of two.
    made = product(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), MM, jnp.float32)
    for scale, shape in zip(scales, ((x.shape[0], 1), (1, y.shape[1])), strict=True):
        need(scale.size == 1 or scale.shape == shape, "its scales are of blocks")
        made = made * scale.astype(jnp.float32).reshape((1, 1) if scale.size == 1 else shape)
    return made if bias is None else made + bias.astype(jnp.float32)


@rule("_scaled_mm.default", OpClass.CONTRACTION)
def scaled_mm(
    cx: Context,
    self: Any,
    mat2: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    need(scale_result is None, "its result is scaled")
    return _scaled(self, mat2, (scale_a, scale_b), bias)


_WHOLE, _BY_ROW = 0, 1  # torch.nn.functional.ScalingType


# Torch 2.11 has no kernel of it for the CPU.
_ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


@rule("_scaled_mm_v2.default", OpClass.CONTRACTION, defines=not _ON_CPU)
def scaled_mm_by_recipes(
    cx: Context,
    self: Any,
    mat2: Any,
    scale_a: Any,
    recipe_a: Any,
    swizzle_a: Any,
    scale_b: Any,
    recipe_b: Any,
    swizzle_b: Any,
    bias: Any = None,
    out_dtype: Any = None,
    contraction_dim: Any = (),
    use_fast_accum: bool = False,
) -> Any:
    need(len(scale_a) == len(scale_b) == 1, "it has several scales")
    need({*recipe_a, *recipe_b} <= {_WHOLE, _BY_ROW}, "its scales are of blocks")
    need(not any((*swizzle_a, *swizzle_b)) and not contraction_dim, "its numbers are in another order")
    return _scaled(self, mat2, (scale_a[0], scale_b[0]), bias)


@rule("_weight_int8pack_mm.default", OpClass.CONTRACTION)
def weight_int8pack_mm(cx: Context, self: Any, mat2: Any, scales: Any) -> Any:
    return product(self, mat2.T.astype(self.dtype), MM) * scales.astype(accumulator(self.dtype))
