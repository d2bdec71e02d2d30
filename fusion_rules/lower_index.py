"""Indexing by tensors: `x[i, :, j]` and its writes, index_* ops, masks, take and put.

Every position is checked with eager's exception. Positions that torch counts from the end are wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .elementwise import as_array, is_one, kind, spread, where
from .indexing import as_index, fill_value, opmath, put_at, rank, reduce_at, take_at, wrap, zeros
from .lowering import Context, NoLowering
from .rule import OpClass, rule

_OUT_OF_BOUNDS = "index {value} is out of bounds for dimension %d with size %d"
_OUT_OF_SELF = "index out of range in self"


# x[i, :, j]


def _is_mask(index: Any) -> bool:
    return index is not None and (kind(index) == "b" or np.dtype(index.dtype) == np.uint8)


def _positions(cx: Context, x: Any, indices: Sequence[Any]) -> tuple[tuple[int, ...], list[Any], int]:
    """The indexed dimensions, their positions from 0, and where the result has the index dimensions.

    Raises:
        NoLowering: a mask, whose result depends on values.
    """
    if any(_is_mask(i) for i in indices):
        raise NoLowering("indexing by a mask: how much it selects depends on values")
    dims = tuple(d for d, i in enumerate(indices) if i is not None)
    found = []
    for k, d in enumerate(dims):
        index, size = as_index(indices[d]), x.shape[d]
        # Eager has brought the indexed dimensions to the front when it counts them for its message.
        cx.check_index(index, -size, size, "IndexError", _OUT_OF_BOUNDS % (k, size))
        found.append(wrap(index, size))
    adjacent = not dims or dims[-1] - dims[0] == len(dims) - 1
    return dims, found, dims[0] if dims and adjacent else 0


@rule(["index.Tensor", "_unsafe_index.Tensor"], OpClass.GATHER)
def index(cx: Context, self: Any, indices: Sequence[Any]) -> Any:
    dims, found, position = _positions(cx, self, indices)
    return take_at(self, dims, found, position) if dims else self


@rule(["index_put.default", "_unsafe_index_put.default"], OpClass.SCATTER)
def index_put(cx: Context, self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    values = values.astype(self.dtype)
    given = [d for d, i in enumerate(indices) if i is not None]
    if len(given) == 1 and kind(indices[given[0]]) == "b":
        return _mask_put(cx, self, given[0], indices[given[0]], values, accumulate)
    dims, found, position = _positions(cx, self, indices)
    batch = np.broadcast_shapes(*(i.shape for i in found))
    rest = [n for d, n in enumerate(self.shape) if d not in dims]
    values = _fit(values, (*rest[:position], *batch, *rest[position:]))
    if not dims:
        return self + values if accumulate else values
    return put_at(self, dims, found, position, values, "add" if accumulate else "set")


@rule("_index_put_impl.default", OpClass.SCATTER)
def index_put_impl(
    cx: Context, self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False
) -> Any:
    return index_put(cx, self, indices, values, accumulate)


def _fit(values: Any, shape: tuple[int, ...]) -> Any:
    """`values` broadcast to `shape`; torch lets values have more dimensions than the target if they are of size 1."""
    extra = max(values.ndim - len(shape), 0)
    return spread(values.reshape(values.shape[extra:]), shape)


def _mask_put(cx: Context, self: Any, dim: int, mask: Any, values: Any, accumulate: bool) -> Any:
    """`self[..., mask, ...] = values` without knowing how much the mask selects, `dim` being its first dimension."""
    tail = self.ndim - dim - mask.ndim
    around = (*self.shape[:dim], 1, *self.shape[dim + mask.ndim :])
    rows = values.shape[-tail - 1] if values.ndim > tail else 1
    given = str(list(values.shape))
    values = _fit(values, (*around[:dim], rows, *around[dim + 1 :]))
    if rows == 1:
        spots = values.reshape((*around[:dim], *(1,) * mask.ndim, *around[dim + 1 :]))
    else:
        total = mask.astype(np.int64).sum()
        shape = ", ".join("{value}" if d == dim else str(n) for d, n in enumerate(around))
        message = f"shape mismatch: value tensor of shape {given} cannot be broadcast to indexing result of shape "
        cx.check(total != rows, "RuntimeError", f"{message}[{shape}]", total)
        if rows == 0:
            return self
        at = lax.clamp(np.int64(0), as_index(rank(mask)), np.int64(rows - 1))
        spots = take_at(values, (dim,), [at], dim).reshape(self.shape)
    hit = lax.broadcast_in_dim(mask, self.shape, tuple(range(dim, dim + mask.ndim)))
    spots = spread(spots, self.shape)
    if accumulate:
        spots = self | spots if kind(self) == "b" else self + spots
    return lax.select(hit, spots, self)


# index_select, index_add, index_copy, index_fill, index_reduce


def _line(self: Any, dim: int, index: Any) -> tuple[Any, int, Any]:
    """`self` with at least one dimension, `dim` from 0, and the index as a 1-d int64 array."""
    self = self.reshape((1,)) if self.ndim == 0 else self
    return self, dim % self.ndim, as_index(index).reshape(-1)


def _source(self: Any, dim: int, index: Any, source: Any) -> Any:
    return source.astype(self.dtype).reshape([index.size if d == dim else n for d, n in enumerate(self.shape)])


def check_select(cx: Context, self: Any, dim: int, index: Any) -> None:
    """The check of `index_select` and `embedding`, whose kernels for the second dimension speak differently."""
    n = self.shape[dim]
    if self.size == 0 or (dim == 1 and self.ndim > 1):
        message = f"INDICES element is out of DATA bounds, id={{value}} axis_dim={n}"
        cx.check_index(index, 0, n, "RuntimeError", message)
    else:
        cx.check_index(index, 0, n, "IndexError", _OUT_OF_SELF)


@rule("index_select.default", OpClass.GATHER)
def index_select(cx: Context, self: Any, dim: int, index: Any) -> Any:
    line, dim, at = _line(self, dim, index)
    check_select(cx, line, dim, at)
    return take_at(line, (dim,), [at], dim).reshape(cx.out[0].shape)


@rule("index_add.default", OpClass.SCATTER)
def index_add(cx: Context, self: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    line, dim, at = _line(self, dim, index)
    n = line.shape[dim]
    # Eager adds along the first and last dimension by scatter_add, which has its own words, unless alpha is given.
    scatters = line.ndim > 1 and dim in (0, line.ndim - 1) and is_one(alpha) and index.dtype == np.int64
    if line.size and scatters:
        cx.check_index(at, 0, n, "RuntimeError", _OUT_OF_BOUNDS % (dim, n))
    elif line.size:
        cx.check_index(at, 0, n, "IndexError", _OUT_OF_SELF)
    values = _source(line, dim, at, source)
    wide = opmath(line.dtype) if scatters else line.dtype
    if not is_one(alpha) and kind(line) == "b":
        values = values & as_array(alpha, np.bool_)
    elif not is_one(alpha):
        scale = opmath(line.dtype)
        values = (as_array(values, scale) * as_array(alpha, scale)).astype(line.dtype)
    return put_at(line.astype(wide), (dim,), [at], dim, values.astype(wide), "add").reshape(self.shape)


@rule("index_copy.default", OpClass.SCATTER)
def index_copy(cx: Context, self: Any, dim: int, index: Any, source: Any) -> Any:
    line, dim, at = _line(self, dim, index)
    n = line.shape[dim]
    if line.size:
        cx.check_index(at, 0, n, "IndexError", "index_copy_(): " + _OUT_OF_BOUNDS % (dim, n))
    return put_at(line, (dim,), [at], dim, _source(line, dim, at, source), "set").reshape(self.shape)


@rule(["index_fill.int_Scalar", "index_fill.int_Tensor"], OpClass.SCATTER)
def index_fill(cx: Context, self: Any, dim: int, index: Any, value: Any) -> Any:
    line, dim, at = _line(self, dim, index)
    n = line.shape[dim]
    if line.size == 0:
        return self
    cx.check_index(at, -n, n, "IndexError", _OUT_OF_BOUNDS % (dim, n))
    # A scatter along one line, then a select, which fuses with its neighbours as a scatter of windows does not.
    marks = spread(np.ones((), np.bool_), at.shape)
    hit = put_at(zeros((n,), np.bool_), (0,), [wrap(at, n)], 0, marks, "set")
    fill = fill_value(cx, value, cx.out[0].dtype).reshape(())
    return where(lax.broadcast_in_dim(hit, line.shape, (dim,)), fill, line).reshape(self.shape)


@rule("index_reduce.default", OpClass.SCATTER)
def index_reduce(
    cx: Context, self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    line, dim, at = _line(self, dim, index)
    if line.size:
        cx.check_index(at, 0, line.shape[dim], "IndexError", _OUT_OF_SELF)
    values = _source(line, dim, at, source)
    return reduce_at(line, (dim,), at, dim, values, reduce, include_self).reshape(self.shape)


# take, put


def _check_take(cx: Context, self: Any, index: Any) -> None:
    n = self.size
    if n == 0 and index.size:
        raise NoLowering("taking from an empty tensor: eager raises")
    message = f"out of range: tried to access index {{value}} on a tensor of {n} elements."
    cx.check_index(index, -n, n, "IndexError", message)


@rule("take.default", OpClass.GATHER)
def take(cx: Context, self: Any, index: Any) -> Any:
    at = as_index(index)
    _check_take(cx, self, at)
    return take_at(self.reshape(-1), (0,), [wrap(at, self.size)], 0)


@rule("put.default", OpClass.SCATTER)
def put(cx: Context, self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    at = as_index(index).reshape(-1)
    _check_take(cx, self, at)
    values, how = source.astype(self.dtype).reshape(-1), "add" if accumulate else "set"
    return put_at(self.reshape(-1), (0,), [wrap(at, self.size)], 0, values, how).reshape(self.shape)


# masks


@rule(["masked_fill.Scalar", "masked_fill.Tensor"], OpClass.POINTWISE, may_raise=True)
def masked_fill(cx: Context, self: Any, mask: Any, value: Any) -> Any:
    out = cx.out[0]
    return lax.select(
        spread(mask != 0 if kind(mask) != "b" else mask, out.shape),
        spread(fill_value(cx, value, out.dtype).reshape(()), out.shape),
        spread(self, out.shape),
    )


@rule("masked_scatter.default", OpClass.SCATTER)
def masked_scatter(cx: Context, self: Any, mask: Any, source: Any) -> Any:
    shape = cx.out[0].shape
    self, mask = spread(self, shape), spread(mask, shape)
    if self.size == 0:
        return self
    number = rank(mask)
    cx.check(number[-1] >= source.size, "RuntimeError", "Number of elements of source < number of ones in mask")
    if source.size == 0:
        return self
    at = lax.clamp(np.int32(0), number, np.int32(source.size - 1))
    values = take_at(source.reshape(-1), (0,), [as_index(at)], 0)
    return lax.select(mask, values.reshape(shape), self)


@rule("masked_scatter_backward.default", OpClass.SCATTER)
def masked_scatter_backward(cx: Context, grad_output: Any, mask: Any, sizes: Sequence[int]) -> Any:
    n = math.prod(sizes)
    mask = spread(mask, tuple(grad_output.shape)).reshape(-1)
    grad = where(mask, grad_output.reshape(-1), zeros((), grad_output.dtype))
    # What the mask leaves out goes to a position past the end, which a scatter drops.
    at = where(mask, as_index(rank(mask)), np.int64(n))
    return put_at(zeros((n,), grad.dtype), (0,), [at], 0, grad, "set").reshape(tuple(sizes))


@rule("_unsafe_masked_index.default", OpClass.GATHER)
def unsafe_masked_index(cx: Context, self: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    """Where the mask is false the positions may be anything."""
    out = cx.out[0]
    fill = fill_value(cx, fill, out.dtype)
    if self.size == 0:
        return spread(fill, out.shape)
    dims, found, position = _masked_positions(self, indices)
    return where(spread(mask, out.shape), take_at(self, dims, found, position), fill)


@rule("_unsafe_masked_index_put_accumulate.default", OpClass.SCATTER)
def unsafe_masked_index_put(cx: Context, self: Any, mask: Any, indices: Sequence[Any], values: Any) -> Any:
    if self.size == 0:
        return self
    dims, found, position = _masked_positions(self, indices)
    values = where(spread(mask, values.shape), values.astype(self.dtype), np.zeros((), self.dtype))
    return put_at(self, dims, found, position, values, "add")


def _masked_positions(x: Any, indices: Sequence[Any]) -> tuple[tuple[int, ...], list[Any], int]:
    inside = [None if i is None else lax.clamp(np.int64(-n), as_index(i), np.int64(n - 1))
              for i, n in zip(indices, x.shape, strict=False)]
    return _positions(Context((), bounds=False), x, inside)
