"""Ops that move elements: cat, flip, roll, repeat, triangles, diagonals, writes into slices, and views as copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .elementwise import spread
from .geometry import overwrite, reinterpret
from .indexing import INDEX, as_index, iota, opmath, put_at, take_at, zeros
from .lowering import Context, NoLowering
from .platforms import variants
from .rule import OpClass, rule
from .spec import JAX_DTYPE


def _dim(dim: int, ndim: int) -> int:
    return dim % max(ndim, 1)


def _move(x: Any, source: Sequence[int], destination: Sequence[int]) -> Any:
    """`x` with dimensions moved as `torch.movedim` does."""
    rest = iter(d for d in range(x.ndim) if d not in source)
    return x.transpose([source[destination.index(d)] if d in destination else next(rest) for d in range(x.ndim)])


# Joining


@rule("cat.default", OpClass.SHAPE)
def cat(cx: Context, tensors: Sequence[Any], dim: int = 0) -> Any:
    out = cx.out[0]
    # An empty 1-d tensor may stand among tensors of any rank, for history's sake.
    kept = [t.astype(JAX_DTYPE[out.dtype]) for t in tensors if t.ndim == len(out.shape)]
    kept = [t for t in kept if t.size] or kept[:1]
    if not kept or 0 in out.shape:
        return zeros(out.shape, JAX_DTYPE[out.dtype])
    dim = _dim(dim, len(out.shape))
    return joined(kept, dim)


@variants
def joined(parts: Sequence[Any], dim: int) -> Any:
    """Arrays of one dtype and rank, none of them empty, one after another along a dimension."""
    return lax.concatenate(parts, dim)


@rule("stack.default", OpClass.SHAPE)
def stack(cx: Context, tensors: Sequence[Any], dim: int = 0) -> Any:
    out = cx.out[0]
    dim = dim % len(out.shape)
    return lax.concatenate([lax.expand_dims(t.astype(JAX_DTYPE[out.dtype]), (dim,)) for t in tensors], dim)


@rule("block_diag.default", OpClass.SHAPE)
def block_diag(cx: Context, tensors: Sequence[Any]) -> Any:
    out, rows, column = cx.out[0], [], 0
    zero = np.zeros((), JAX_DTYPE[out.dtype])
    for t in tensors:
        t = t.astype(zero.dtype).reshape((1,) * (2 - t.ndim) + tuple(t.shape))
        rows.append(lax.pad(t, zero, [(0, 0, 0), (column, out.shape[1] - column - t.shape[1], 0)]))
        column += t.shape[1]
    return lax.concatenate(rows, 0)


# Repeating and turning


@rule("flip.default", OpClass.SHAPE)
def flip(cx: Context, self: Any, dims: Sequence[int]) -> Any:
    return lax.rev(self, tuple(_dim(d, self.ndim) for d in dims)) if self.ndim else self


@rule("roll.default", OpClass.SHAPE)
def roll(cx: Context, self: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if self.size == 0:
        return self
    if not dims:
        return roll(cx, self.reshape(-1), shifts, [0]).reshape(self.shape)
    for shift, d in zip(shifts, dims, strict=True):
        d = _dim(d, self.ndim)
        cut = -shift % self.shape[d] if self.ndim else 0
        if cut:
            ends = [lax.slice_in_dim(self, cut, None, axis=d), lax.slice_in_dim(self, 0, cut, axis=d)]
            self = lax.concatenate(ends, d)
    return self


@rule(["channel_shuffle.default", "native_channel_shuffle.default"], OpClass.SHAPE)
def channel_shuffle(cx: Context, self: Any, groups: int) -> Any:
    n, c, *rest = self.shape
    return self.reshape((n, groups, c // groups, *rest)).swapaxes(1, 2).reshape(self.shape)


@rule("repeat.default", OpClass.SHAPE)
def repeat(cx: Context, self: Any, repeats: Sequence[int]) -> Any:
    shape = (1,) * (len(repeats) - self.ndim) + tuple(self.shape)
    pairs = tuple(n for pair in zip(repeats, shape, strict=True) for n in pair)
    odd = tuple(range(1, len(pairs), 2))
    return lax.broadcast_in_dim(self.reshape(shape), pairs, odd).reshape(cx.out[0].shape)


@rule("repeat_interleave.Tensor", OpClass.SHAPE, may_raise=True)
def repeat_interleave(cx: Context, repeats: Any, *, output_size: int | None = None) -> Any:
    """Position `i` as often as `repeats[i]` says."""
    if output_size is None:
        raise NoLowering("repeat_interleave without output_size: the length depends on values")
    count = as_index(repeats)
    cx.check_index(count, 0, np.iinfo(np.int64).max, "RuntimeError", "repeats can not be negative")
    ends = lax.cumsum(count)
    if count.size == 0 or output_size == 0:
        return zeros((output_size,), INDEX)
    cx.check(ends[-1] != output_size, "RuntimeError", "allocated size does not match required size")
    # A step up wherever one position ends.
    steps = put_at(zeros((output_size,), INDEX), (0,), [ends[:-1]], 0, lax.full((count.size - 1,), np.int64(1)), "add")
    return lax.cumsum(steps)


# Triangles and diagonals: selects over positions, which fuse


def _below(shape: Sequence[int], diagonal: Any) -> Any:
    return iota(shape, len(shape) - 1) - iota(shape, len(shape) - 2) <= diagonal


@rule("tril.default", OpClass.POINTWISE)
def tril(cx: Context, self: Any, diagonal: int = 0) -> Any:
    return lax.select(_below(self.shape, diagonal), self, zeros(self.shape, self.dtype))


@rule("triu.default", OpClass.POINTWISE)
def triu(cx: Context, self: Any, diagonal: int = 0) -> Any:
    return lax.select(_below(self.shape, diagonal - 1), zeros(self.shape, self.dtype), self)


@rule("tril_indices.default", OpClass.FACTORY)
def tril_indices(cx: Context, row: int, col: int, offset: int = 0, **options: Any) -> Any:
    return np.stack(np.tril_indices(row, offset, col))


@rule("triu_indices.default", OpClass.FACTORY)
def triu_indices(cx: Context, row: int, col: int, offset: int = 0, **options: Any) -> Any:
    return np.stack(np.triu_indices(row, offset, col))


def _on_diagonal(base: Any, values: Any, offset: int, dim1: int, dim2: int) -> Any:
    """`base` with the diagonal of its dimensions `dim1, dim2` replaced by `values`, which has it as last dimension."""
    ndim = base.ndim
    dim1, dim2 = dim1 % ndim, dim2 % ndim
    # An element of the diagonal is told by its row, or above the first row's diagonal by its column.
    along = dim1 if offset >= 0 else dim2
    short = base.shape[along] - values.shape[-1]
    values = lax.pad(values, np.zeros((), values.dtype), [(0, 0, 0)] * (values.ndim - 1) + [(0, short, 0)])
    places = sorted({*range(ndim)} - {dim1 + dim2 - along})
    values = _move(values, [values.ndim - 1], [places.index(along)])
    values = lax.broadcast_in_dim(values, base.shape, tuple(places))
    return lax.select(iota(base.shape, dim2) - iota(base.shape, dim1) == offset, values, base)


@rule("diag_embed.default", OpClass.SHAPE)
def diag_embed(cx: Context, self: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return _on_diagonal(zeros(cx.out[0].shape, self.dtype), self, offset, dim1, dim2)


@rule("diagonal_backward.default", OpClass.SHAPE)
def diagonal_backward(
    cx: Context, grad_output: Any, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Any:
    return _on_diagonal(zeros(input_sizes, grad_output.dtype), grad_output, offset, dim1, dim2)


@rule("diagonal_scatter.default", OpClass.SHAPE)
def diagonal_scatter(cx: Context, self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return _on_diagonal(self, src.astype(self.dtype), offset, dim1, dim2)


# Slices and selections written back. Starts are hoisted: `x[:, t]` for a hundred values of t is one compilation.


def _place(base: Any, part: Any, dim: int, start: Any, step: int) -> Any:
    """`base` with every `step`-th element along `dim`, from `start`, replaced by `part`."""
    if part.size == 0:
        return base
    n, m = base.shape[dim], part.shape[dim]
    start = np.int64(start) if isinstance(start, int) else start
    start = lax.clamp(np.int64(0), lax.select(start < 0, start + n, start), np.int64(n))
    if step == 1:
        at = [start if d == dim else np.int64(0) for d in range(base.ndim)]
        return overwrite(base, part, at)
    k = iota(base.shape, dim) - start
    inside = (k >= 0) & (k < m * step) & (lax.rem(k, np.int64(step)) == 0)
    line = lax.clamp(np.int64(0), lax.div(iota((n,), 0) - start, np.int64(step)), np.int64(m - 1))
    return lax.select(inside, take_at(part, (dim,), [line], dim), base)


@rule("slice_backward.default", OpClass.SHAPE, hoist=["start", "end"])
def slice_backward(
    cx: Context, grad_output: Any, input_sizes: Sequence[int], dim: int, start: Any, end: Any, step: int
) -> Any:
    dim = dim % len(input_sizes)
    if isinstance(start, int) and grad_output.size:
        start = min(max(start + input_sizes[dim] if start < 0 else start, 0), input_sizes[dim])
        after = input_sizes[dim] - start - (grad_output.shape[dim] - 1) * step - 1
        edges = [(start, after, step - 1) if d == dim else (0, 0, 0) for d in range(grad_output.ndim)]
        return lax.pad(grad_output, np.zeros((), grad_output.dtype), edges)
    return _place(zeros(input_sizes, grad_output.dtype), grad_output, dim, start, step)


@rule("slice_scatter.default", OpClass.SHAPE, hoist=["start", "end"])
def slice_scatter(
    cx: Context, self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    dim = dim % self.ndim
    return _place(self, src.astype(self.dtype), dim, 0 if start is None else start, step)


def _select_into(base: Any, part: Any, dim: int, index: Any) -> Any:
    index = lax.select(index < 0, index + base.shape[dim], index) if not isinstance(index, int) else (
        index % base.shape[dim])
    hit = iota(base.shape, dim) == index
    rest = tuple(d for d in range(base.ndim) if d != dim)
    return lax.select(hit, lax.broadcast_in_dim(part, base.shape, rest), base)


@rule("select_backward.default", OpClass.SHAPE, hoist=["index"])
def select_backward(cx: Context, grad_output: Any, input_sizes: Sequence[int], dim: int, index: Any) -> Any:
    return _select_into(zeros(input_sizes, grad_output.dtype), grad_output, dim % len(input_sizes), index)


@rule("select_scatter.default", OpClass.SHAPE, hoist=["index"])
def select_scatter(cx: Context, self: Any, src: Any, dim: int, index: Any) -> Any:
    return _select_into(self, src.astype(self.dtype), dim % self.ndim, index)


@rule("unfold_backward.default", OpClass.SHAPE)
def unfold_backward(cx: Context, grad_in: Any, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Any:
    """Windows of `size` every `step` elements, summed where they overlap.

    A window is cut into r blocks of `step` elements; block q of window w belongs to block w + q of the input. Padding
    each of the r rows of blocks by one row and dropping the end of the whole shifts row q by q, so that one sum over
    rows does what would be r shifted additions.
    """
    out = cx.out[0]
    if not input_sizes:
        return lax.reduce_sum(grad_in.astype(opmath(grad_in.dtype)), (0,)).reshape(out.shape)
    if grad_in.size == 0:
        return zeros(out.shape, grad_in.dtype)
    dim = dim % len(input_sizes)
    n, rows = grad_in.shape[dim], -(-size // step)
    zero = np.zeros((), grad_in.dtype)
    g = _move(grad_in, [dim], [grad_in.ndim - 2])
    lead = g.shape[:-2]
    g = lax.pad(g, zero, [(0, 0, 0)] * (g.ndim - 1) + [(0, rows * step - size, 0)])
    g = g.reshape((*lead, n, rows, step)).swapaxes(-3, -2)
    g = lax.pad(g, zero, [(0, 0, 0)] * (g.ndim - 2) + [(0, rows, 0), (0, 0, 0)])
    g = lax.slice_in_dim(g.reshape((*lead, rows * (n + rows), step)), 0, rows * (n + rows - 1), axis=len(lead))
    g = g.reshape((*lead, rows, n + rows - 1, step)).astype(opmath(g.dtype))
    line = lax.reduce_sum(g, (len(lead),)).reshape((*lead, (n + rows - 1) * step)).astype(zero.dtype)
    line = lax.pad(line, zero, [(0, 0, 0)] * len(lead) + [(0, input_sizes[dim] - line.shape[-1], 0)])
    return _move(line, [line.ndim - 1], [dim])


# Views as copies


def _shaped(cx: Context, self: Any, *args: Any, **options: Any) -> Any:
    return self.reshape(cx.out[0].shape)


rule(
    ["view_copy.default", "_reshape_alias_copy.default", "squeeze_copy.default", "squeeze_copy.dim",
     "squeeze_copy.dims", "unsqueeze_copy.default", "alias_copy.default", "detach_copy.default", "lift.default"],
    OpClass.SHAPE,
)(_shaped)


@rule(["as_strided_copy.default", "as_strided_scatter.default"], OpClass.SHAPE)
def strided(cx: Context, self: Any, *args: Any) -> Any:
    raise NoLowering("it reads the storage behind its argument, of which a lowering sees only the values")


@rule("view_copy.dtype", OpClass.SHAPE)
def view_copy_dtype(cx: Context, self: Any, dtype: Any) -> Any:
    return reinterpret(self.reshape(-1), dtype).reshape(cx.out[0].shape)


@rule("expand_copy.default", OpClass.SHAPE)
def expand_copy(cx: Context, self: Any, size: Sequence[int], *, implicit: bool = False) -> Any:
    return spread(self, cx.out[0].shape)


@rule("permute_copy.default", OpClass.SHAPE)
def permute_copy(cx: Context, self: Any, dims: Sequence[int]) -> Any:
    return self.transpose([_dim(d, self.ndim) for d in dims])


@rule("transpose_copy.int", OpClass.SHAPE)
def transpose_copy(cx: Context, self: Any, dim0: int, dim1: int) -> Any:
    return self.swapaxes(dim0, dim1) if self.ndim else self


@rule("t_copy.default", OpClass.SHAPE)
def t_copy(cx: Context, self: Any) -> Any:
    return self.T


@rule("select_copy.int", OpClass.SHAPE)
def select_copy(cx: Context, self: Any, dim: int, index: int) -> Any:
    dim = dim % self.ndim
    return lax.index_in_dim(self, index % self.shape[dim], dim, keepdims=False)


@rule("slice_copy.Tensor", OpClass.SHAPE)
def slice_copy(
    cx: Context, self: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    first, stop, _ = slice(start, end).indices(self.shape[dim])
    return lax.slice_in_dim(self, first, max(first, stop), step, dim % self.ndim)


@rule("narrow_copy.default", OpClass.SHAPE)
def narrow_copy(cx: Context, self: Any, dim: int, start: int, length: int) -> Any:
    dim = dim % self.ndim
    start = start + self.shape[dim] if start < 0 else start
    return lax.slice_in_dim(self, start, start + length, 1, dim)


def _pieces(cx: Context, self: Any, sizes: Any, dim: int = 0) -> list[Any]:
    """Consecutive slices as long as the outputs are; the row's own argument says the same."""
    dim, start, pieces = dim % self.ndim, 0, []
    for out in cx.out:
        pieces.append(lax.slice_in_dim(self, start, start + out.shape[dim], 1, dim))
        start += out.shape[dim]
    return pieces


rule(
    ["split_copy.Tensor", "split_with_sizes_copy.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default"],
    OpClass.SHAPE,
)(_pieces)


@rule("unbind_copy.int", OpClass.SHAPE)
def unbind_copy(cx: Context, self: Any, dim: int = 0) -> list[Any]:
    return [lax.index_in_dim(self, i, dim % self.ndim, keepdims=False) for i in range(len(cx.out))]


@rule("diagonal_copy.default", OpClass.SHAPE)
def diagonal_copy(cx: Context, self: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    dim1, dim2 = dim1 % self.ndim, dim2 % self.ndim
    k = iota((cx.out[0].shape[-1],), 0)
    places = {dim1: k + max(-offset, 0), dim2: k + max(offset, 0)}
    dims = tuple(sorted(places))
    return take_at(self, dims, [places[d] for d in dims], self.ndim - 2)


@rule("unfold_copy.default", OpClass.SHAPE)
def unfold_copy(cx: Context, self: Any, dimension: int, size: int, step: int) -> Any:
    out = cx.out[0]
    if self.ndim == 0:
        return spread(self, out.shape)
    dim = dimension % self.ndim
    n = out.shape[dim]
    windows = take_at(self, (dim,), [iota((n, size), 0) * step + iota((n, size), 1)], dim)
    return _move(windows, [dim + 1], [self.ndim])
