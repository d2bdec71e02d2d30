"""Sorting, selection by rank, and search in sorted sequences.

Where torch leaves open which of several equal elements it names (`sort` without `stable`, `topk`, `kthvalue`), ATen's
answer follows from the inner workings of `std::sort` and `std::nth_element`. Such an op is lowered for float32 and
float64, in which equal elements are rare: there it is the first of them. Integers, booleans and half types go to ATen,
and so do the few largest of few (`topk` with `sorted=False`), which `std::nth_element` leaves in an order of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jax import lax

from .axes import at_least_1d, axis_of, index_along, keep_axes
from .elementwise import NUMBERS, isnan, kind, need, where
from .lowering import Context
from .ordering import pick, search, stable_order
from .rule import OpClass, rule
from .spec import JAX_DTYPE, torch_dtype


def _decline_open_ties(x: Any) -> None:
    need(kind(x) == "f" and x.dtype.itemsize >= 4, "which of several equal elements is meant is up to ATen's algorithm")


# --- sort and topk


@rule(["sort.default", "sort.stable"], OpClass.SORT)
def sort(cx: Context, self: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    x = at_least_1d(self)
    axis = axis_of(dim, x.ndim)
    if not stable:
        _decline_open_ties(x)
    order = stable_order(x, axis, descending)
    return lax.reshape(pick(x, order, axis), self.shape), lax.reshape(order, self.shape)


def _top(x: Any, k: int, axis: int, largest: bool) -> Any:
    """Positions of the k largest or smallest elements along an axis, best first."""
    n = x.shape[axis]
    if x.dtype != np.float32 or 4 * k > n:
        return lax.slice_in_dim(stable_order(x, axis, largest), 0, k, axis=axis)
    # XLA has a fast kernel for a few of many float32. It compares bits: a NaN is as large as its sign is positive.
    if largest:
        ranked = where(isnan(x), np.asarray(np.nan, x.dtype), where(x == 0, 0, x))
    else:
        ranked = where(isnan(x), -np.asarray(np.nan, x.dtype), where(x == 0, 0, -x))
    last = ranked.ndim - 1
    swap = [*(a for a in range(ranked.ndim) if a != axis), axis]
    found = lax.top_k(lax.transpose(ranked, swap) if axis != last else ranked, k)[1].astype(np.int64)
    return found if axis == last else lax.transpose(found, [*range(axis), last, *range(axis, last)])


@rule("topk.default", OpClass.SORT)
def topk(cx: Context, self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    x = at_least_1d(self)
    axis = axis_of(dim, x.ndim)
    if 0 in cx.out[0].shape:
        return lax.full(cx.out[0].shape, 0, x.dtype), lax.full(cx.out[0].shape, 0, np.int64)
    _decline_open_ties(x)
    in_order = sorted or k == 1 or 64 * k <= x.shape[axis]  # ATen puts the first in order where they are few
    need(in_order, "the order of what is not to be sorted is up to ATen's algorithm")
    found = _top(x, k, axis, largest)
    return lax.reshape(pick(x, found, axis), cx.out[0].shape), lax.reshape(found, cx.out[1].shape)


# --- one element by its rank


def _selected(cx: Context, x: Any, index: Any, axis: int) -> Any:
    """Values and int64 indices at one position of each row, in the shapes that are asked for."""
    return lax.reshape(pick(x, index, axis), cx.out[0].shape), lax.reshape(index, cx.out[1].shape)


@rule("kthvalue.default", OpClass.SORT)
def kthvalue(cx: Context, self: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    x = at_least_1d(self)
    axis = axis_of(dim, x.ndim)
    _decline_open_ties(x)
    return _selected(cx, x, lax.slice_in_dim(stable_order(x, axis), k - 1, k, axis=axis), axis)


def _median_index(x: Any, axis: int, ignore_nan: bool) -> Any:
    """The position of the lower median of each row (axis kept). With NaNs: the first of them, or ignoring them."""
    n = x.shape[axis]
    order = stable_order(x, axis)
    if kind(x) != "f":
        return lax.slice_in_dim(order, (n - 1) // 2, (n - 1) // 2 + 1, axis=axis)
    nans = keep_axes(lax.reduce_sum(isnan(x).astype(np.int64), (axis,)), (axis,))
    if ignore_nan:
        rank = lax.max(n - nans - 1, lax.full_like(nans, 0)) // 2
    else:
        # NaNs are at the end, in their order.
        rank = where(nans > 0, n - nans, (n - 1) // 2)
    return pick(order, rank, axis)


def _enter_median(name: str, ignore_nan: bool) -> None:
    @rule(f"{name}.default", OpClass.SORT)
    def median(cx: Context, self: Any) -> Any:
        x = lax.reshape(self, (self.size,))
        if not x.size:
            need(kind(x) == "f", "of no whole numbers the median is a NaN that ATen converts")
            return np.asarray(np.nan, x.dtype)
        return lax.reshape(pick(x, _median_index(x, 0, ignore_nan), 0), ())

    @rule(f"{name}.dim", OpClass.SORT)
    def median_dim(cx: Context, self: Any, dim: int, keepdim: bool = False) -> Any:
        x = at_least_1d(self)
        axis = axis_of(dim, x.ndim)
        return _selected(cx, x, _median_index(x, axis, ignore_nan), axis)


_enter_median("median", False)
_enter_median("nanmedian", True)


@rule("mode.default", OpClass.SORT)
def mode(cx: Context, self: Any, dim: int = -1, keepdim: bool = False) -> Any:
    x = at_least_1d(self)
    axis = axis_of(dim, x.ndim)
    # Up to 16 elements `std::sort` is an insertion sort, and keeps equal elements in order. With a NaN, which is not
    # less than anything, what it leaves is no order, and what counts as one run is up to it.
    need(kind(x) != "f" and x.shape[axis] <= 16, "what is counted as one run is up to ATen's algorithm")
    order = stable_order(x, axis)
    ranked = pick(x, order, axis)
    n = x.shape[axis]
    place = index_along(x.shape, axis)
    front = lax.slice_in_dim(ranked, 0, n - 1, axis=axis) != lax.slice_in_dim(ranked, 1, n, axis=axis)
    edge = lax.full([1 if a == axis else s for a, s in enumerate(x.shape)], True, np.bool_)
    begins = lax.concatenate([edge, front], axis)
    ends = lax.concatenate([front, edge], axis)
    length = place - lax.cummax(where(begins, place, 0), axis) + 1
    length = where(ends, length, 0)
    longest = keep_axes(lax.reduce_max(length, (axis,)), (axis,))
    # The first run of that length is the one of the smallest value.
    best = keep_axes(lax.reduce_min(where(length == longest, place, n - 1), (axis,)), (axis,))
    return _selected(cx, x, pick(order, best, axis), axis)


# --- search


def _example(x: Any) -> Any:
    return x if isinstance(x, NUMBERS) else torch.empty((1,) * x.ndim, dtype=torch_dtype(x), device="meta")


def common(a: Any, b: Any) -> tuple[Any, Any]:
    """Two operands, arrays or numbers, in the dtype to which torch promotes them."""
    dtype = JAX_DTYPE[torch.result_type(_example(a), _example(b))]
    first, second = (np.asarray(x).astype(dtype) if isinstance(x, NUMBERS) else x.astype(dtype) for x in (a, b))
    return first, second


def _searched(sequence: Any, values: Any, right: bool) -> Any:
    sequence, values = common(sequence, values)
    return search(sequence, at_least_1d(values), right).reshape(values.shape)


@rule(["searchsorted.Tensor", "searchsorted.Scalar"], OpClass.SORT, keep=["self"], may_raise=True)
def searchsorted(
    cx: Context,
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if sorter is not None:
        n = sorted_sequence.shape[-1]
        cx.check_index(sorter, 0, n, "RuntimeError", "torch.searchsorted(): sorter index out of range")
        sorted_sequence = pick(sorted_sequence, lax.clamp(np.int64(0), sorter, np.int64(max(n - 1, 0))), -1)
    return _searched(sorted_sequence, self, right if side is None else side == "right")


@rule(["bucketize.Tensor", "bucketize.Scalar"], OpClass.SORT, keep=["self"])
def bucketize(cx: Context, self: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searched(boundaries, self, right)


# Up to here every element is compared with every other; beyond, it is looked up in the sorted ones.
FEW = 32


@rule(["isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor"], OpClass.SORT)
def isin(
    cx: Context,
    elements: Any = None,
    test_elements: Any = None,
    *,
    assume_unique: bool = False,
    invert: bool = False,
    **named: Any,
) -> Any:
    # The overloads with a number call it `element` or `test_element`.
    elements, tests = common(named.get("element", elements), named.get("test_element", test_elements))
    tests = lax.reshape(tests, (tests.size,))
    if tests.size <= FEW:
        found = lax.reduce_or(elements[..., None] == tests, (elements.ndim,))
    else:
        ranked = pick(tests, stable_order(tests, 0), 0)
        place = search(ranked, elements, False)
        place = lax.min(place, np.asarray(tests.size - 1, np.int64))
        found = ranked.at[place].get(mode="promise_in_bounds") == elements
    return ~found if invert else found
