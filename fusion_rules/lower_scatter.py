"""gather and the scatter family: one index for every element, along one dimension.

Positions are not counted from the end here: eager refuses negative ones. Sums and products of narrow floats are rounded
once, from float32, as eager's kernels for this family do (those of index_put, put and embedding round each time).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from .elementwise import kind, product, where
from .indexing import as_index, fill_value, flat_positions, hits, opmath, put_at, reduce_at, spread_line, take_at
from .lowering import Context
from .rule import OpClass, rule


def _lines(cx: Context, self: Any, dim: int, index: Any) -> tuple[Any, int, Any]:
    """`self` and the index with at least one dimension, `dim` from 0, positions checked and as int64."""
    self = self.reshape((1,)) if self.ndim == 0 else self
    index = index.reshape((1,)) if index.ndim == 0 else index
    dim, index = dim % self.ndim, as_index(index)
    n = self.shape[dim]
    cx.check_index(index, 0, n, "RuntimeError", f"index {{value}} is out of bounds for dimension {dim} with size {n}")
    return self, dim, index


def _part(src: Any, index: Any) -> Any:
    """The elements of `src` that have an index: it may be larger in every dimension."""
    src = src.reshape((1,)) if src.ndim == 0 else src
    return lax.slice(src, (0,) * src.ndim, index.shape)


@rule("gather.default", OpClass.GATHER)
def gather(cx: Context, self: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    line, dim, at = _lines(cx, self, dim, index)
    if line.size == 0 or at.size == 0:
        return lax.full(cx.out[0].shape, np.zeros((), self.dtype))
    at = flat_positions(line.shape, dim, at)
    return take_at(line.reshape(-1), (0,), [at], 0).reshape(cx.out[0].shape)


def _scatter(self: Any, dim: int, index: Any, src: Any, how: str) -> Any:
    """Write `src` (shape of the index) into `self`; `how` as in `put_at`."""
    if index.size == 0 or self.size == 0:
        return self
    wide = self.dtype if how == "set" else opmath(self.dtype)
    hit = hits(self.shape, dim, index)
    if hit is None:
        at = flat_positions(self.shape, dim, index).reshape(-1)
        flat = put_at(self.reshape(-1).astype(wide), (0,), [at], 0, src.reshape(-1).astype(wide), how)
        return flat.astype(self.dtype).reshape(self.shape)
    combine = {"set": lambda old, new: new, "add": lax.bitwise_or if kind(self) == "b" else lax.add, "mul": product}
    if kind(self) == "b":
        combine["mul"] = lax.bitwise_and
    return where(hit, combine[how](self, spread_line(src, self.shape)), self)


@rule("scatter.src", OpClass.SCATTER)
def scatter(cx: Context, self: Any, dim: int, index: Any, src: Any) -> Any:
    line, dim, at = _lines(cx, self, dim, index)
    return _scatter(line, dim, at, _part(src, at).astype(line.dtype), "set").reshape(self.shape)


@rule("scatter.value", OpClass.SCATTER)
def scatter_value(cx: Context, self: Any, dim: int, index: Any, value: Any) -> Any:
    line, dim, at = _lines(cx, self, dim, index)
    value = fill_value(cx, value, cx.out[0].dtype)
    return _scatter(line, dim, at, lax.broadcast(value, at.shape), "set").reshape(self.shape)


@rule("scatter_add.default", OpClass.SCATTER)
def scatter_add(cx: Context, self: Any, dim: int, index: Any, src: Any) -> Any:
    line, dim, at = _lines(cx, self, dim, index)
    return _scatter(line, dim, at, _part(src, at).astype(line.dtype), "add").reshape(self.shape)


_LEGACY = {"add": "add", "multiply": "mul"}


@rule("scatter.reduce", OpClass.SCATTER)
def scatter_with(cx: Context, self: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    line, dim, at = _lines(cx, self, dim, index)
    return _scatter(line, dim, at, _part(src, at).astype(line.dtype), _LEGACY[reduce]).reshape(self.shape)


@rule("scatter.value_reduce", OpClass.SCATTER)
def scatter_value_with(cx: Context, self: Any, dim: int, index: Any, value: Any, *, reduce: str) -> Any:
    line, dim, at = _lines(cx, self, dim, index)
    value = fill_value(cx, value, cx.out[0].dtype)
    return _scatter(line, dim, at, lax.broadcast(value, at.shape), _LEGACY[reduce]).reshape(self.shape)


@rule("scatter_reduce.two", OpClass.SCATTER)
def scatter_reduce(
    cx: Context, self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    line, dim, at = _lines(cx, self, dim, index)
    if line.size == 0 or at.size == 0:
        return self
    values = _part(src, at).astype(line.dtype).reshape(-1)
    at = flat_positions(line.shape, dim, at).reshape(-1)
    wide = opmath(line.dtype)
    flat = reduce_at(line.reshape(-1).astype(wide), (0,), at, 0, values.astype(wide), reduce, include_self)
    return flat.reshape(self.shape)
