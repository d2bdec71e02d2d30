"""Reading and writing at computed positions: the one gather and the one scatter under every indexing row.

Measured on XLA:CPU (2 cores): a scatter of whole rows adds 1024 rows of 256 floats into 256 rows in 0.05 ms and into
8192 rows in 0.15 ms (eager 0.09 and 1.3 ms), where a one-hot matmul takes 1.4 and 90 ms, sort and segment sum 0.2 and
0.4 ms. Where the indexed dimension is not the first, XLA brings it to the front and back again: `x[:, i]` of a million
elements took 4 to 10 ms beside any other output, and a scatter-add 4.6 ms. So everything is an index of whole rows of a
reshaped table (0.4 ms), with single elements as the narrowest rows.

XLA clamps the start of a gather and drops the updates of a scatter that leave the operand, so no value of an index
reads or writes undefined memory; the rows' checks turn it into eager's exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from .elementwise import NUMBERS, as_array, convert, kind, need, spread, where
from .geometry import overwrite
from .lowering import Context, NoLowering
from .spec import JAX_DTYPE

INDEX = np.dtype(np.int64)


def as_index(index: Any) -> Any:
    """An index array of any integer dtype as int64, the only dtype in which no size overflows."""
    return index if index.dtype == INDEX else index.astype(INDEX)


def wrap(index: Any, size: int) -> Any:
    """Negative positions counted from the end."""
    return lax.select(index < 0, index + size, index)


def iota(shape: Sequence[int], dim: int) -> Any:
    """int64 positions along `dim` in an array of `shape`."""
    return lax.broadcasted_iota(INDEX, tuple(shape), dim)


def read_flat(values: jax.Array, place: jax.Array) -> jax.Array:
    """`values[place]` of one dimension, at places that are all inside."""
    return _unwrapped(lambda at, **how: at.get(mode="promise_in_bounds", **how), values, place)


def add_flat(values: jax.Array, place: jax.Array, added: jax.Array) -> jax.Array:
    """`values` of one dimension with what is added to some of its places; nothing is at those outside."""
    return _unwrapped(lambda at, **how: at.add(added, mode="drop", **how), values, place)


def unsigned(i: jax.Array) -> jax.Array:
    """What counts the turns of a loop, as a number that nobody has to expect to be negative where it is divided, or is
    a place in an array: that takes three times the instructions, of which XLA compiles and keeps each. A negative one
    becomes one beyond any array."""
    return lax.convert_element_type(i, np.dtype(f"u{i.dtype}"))


def _unwrapped(use: Callable[..., jax.Array], values: jax.Array, place: jax.Array) -> jax.Array:
    """Negative places are not counted from the end: looking for them takes XLA:CPU longer than all the rest."""
    try:
        return use(values.at[place], wrap_negative_indices=False)
    except TypeError:  # jax 0.6 looks for them in signed numbers, always
        return use(values.at[unsigned(place)])


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """An array of zeros (false for bool)."""
    return lax.full(tuple(shape), np.zeros((), dtype))


def opmath(dtype: Any) -> np.dtype:
    """The dtype in which sums and products of `dtype` are accumulated: float32 for the narrow floats."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 and kind(np.empty(0, dtype)) == "f" else dtype


def progression(index: Any) -> tuple[int, int, int] | None:
    """`(start, count, step)` of a constant 1-d index that steps evenly upwards from a position >= 0, else None."""
    if isinstance(index, jax.core.Tracer) or np.ndim(index) != 1 or np.size(index) == 0:
        return None
    values = np.asarray(index)
    steps = np.diff(values)
    step = int(steps[0]) if steps.size else 1
    return (int(values[0]), values.size, step) if step > 0 and values[0] >= 0 and (steps == step).all() else None


def _rows(
    shape: Sequence[int], dims: tuple[int, ...], indices: Sequence[Any], position: int
) -> tuple[Any, tuple[int, ...]]:
    """The windows of an array of `shape` as rows of that array reshaped to `(rows, *inner)`.

    Returns the number of the row for each window, in the order in which `take_at` lays them out, and `inner`. A row
    that does not exist has a number past the end.
    """
    ndim = len(shape)
    batch = np.broadcast_shapes(*(i.shape for i in indices))
    rest = [d for d in range(ndim) if d not in dims]
    # Windows are the dimensions behind the last indexed one: what lies before it counts as an index of its own.
    width = min(ndim - 1 - dims[-1], len(rest) - position)
    lead, inner = tuple(shape[: ndim - width]), tuple(shape[ndim - width :])
    strides = [math.prod(lead[d + 1 :]) for d in range(len(lead))]
    row, outside = None, None
    for index, d in zip(indices, dims, strict=True):
        term = index if strides[d] == 1 else index * strides[d]
        bad = (index < 0) | (index >= shape[d])
        row = term if row is None else row + term
        outside = bad if outside is None else outside | bad
    assert row is not None
    # A column outside of its dimension would be another row's.
    row = spread(where(outside, np.int64(math.prod(lead)), row), batch) if len(lead) > 1 else row
    free = rest[: len(rest) - width]
    layout = (*(shape[d] for d in free[:position]), *batch, *(shape[d] for d in free[position:]))
    places = [p for p in range(len(layout)) if not position <= p < position + len(batch)]
    row = lax.broadcast_in_dim(row, layout, tuple(range(position, position + len(batch))))
    for p, d in zip(places, free, strict=True):
        row = row + iota(layout, p) * strides[d]
    return row, inner


def _one(dims: tuple[int, ...], indices: Sequence[Any], ndim: int) -> list[Any] | None:
    """Where the only window starts, if there is just one position; None if there are several."""
    if any(i.size != 1 for i in indices):
        return None
    starts: list[Any] = [np.zeros((), INDEX)] * ndim
    for i, d in zip(indices, dims, strict=True):
        starts[d] = i.reshape(())
    return starts


def take_at(x: Any, dims: tuple[int, ...], indices: Sequence[Any], position: int) -> Any:
    """The windows of `x` at positions `indices` of its dimensions `dims`.

    Args:
        x: array of any shape.
        dims: ascending dimensions, one for each index.
        indices: int64 arrays that broadcast to a common shape B; positions count from 0.
        position: where B's dimensions stand among the dimensions of `x` that are left.

    Raises:
        NoLowering: a dimension of size 0 is read at some position (eager raises).
    """
    if len(dims) == 1 and (run := progression(indices[0])) is not None and position == dims[0]:
        start, count, step = run
        if start + (count - 1) * step < x.shape[dims[0]]:
            return lax.slice_in_dim(x, start, start + (count - 1) * step + 1, step, dims[0])
    batch = np.broadcast_shapes(*(i.shape for i in indices))
    rest = [n for d, n in enumerate(x.shape) if d not in dims]
    shape = (*rest[:position], *batch, *rest[position:])
    if 0 in shape:
        return zeros(shape, x.dtype)
    if 0 in x.shape:
        raise NoLowering("an index into a dimension of size 0: eager raises")
    if (starts := _one(dims, indices, x.ndim)) is not None:
        sizes = [1 if d in dims else n for d, n in enumerate(x.shape)]
        return lax.dynamic_slice(x, starts, sizes).reshape(shape)
    rows, inner = _rows(x.shape, dims, indices, position)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(rows.ndim, rows.ndim + len(inner))), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    table, at = x.reshape((-1, *inner)), lax.expand_dims(rows, (rows.ndim,))
    return lax.gather(table, at, numbers, (1, *inner), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


_SCATTERS = {
    "set": lax.scatter, "add": lax.scatter_add, "mul": lax.scatter_mul, "max": lax.scatter_max, "min": lax.scatter_min
}


def put_at(x: Any, dims: tuple[int, ...], indices: Sequence[Any], position: int, values: Any, how: str) -> Any:
    """`x` with `values`, laid out as `take_at` returns them, written at positions `indices` of dimensions `dims`.

    `how` is set, add, mul, max or min; all but set count every update of an element that is hit more than once, and
    round after each, in the dtype of `x`. Positions outside of `x`, negative ones too, are left out; only the set of a
    single position moves inside.

    Raises:
        NoLowering: products of complex64 (`elementwise.product`), which are left to ATen.
    """
    if values.size == 0 or x.size == 0:
        return x
    need(how != "mul" or x.dtype != np.complex64, "XLA's scatter rounds products of complex64 otherwise than eager")
    if kind(x) == "b" and how != "set":
        how = {"add": "max", "mul": "min"}.get(how, how)
        return put_at(x.astype(np.int8), dims, indices, position, values.astype(np.int8), how).astype(np.bool_)
    if how == "set" and (starts := _one(dims, indices, x.ndim)) is not None:
        # As in a key-value cache: XLA updates in place, in half the time of its scatter (7 us, 15 us).
        box = [1 if d in dims else n for d, n in enumerate(x.shape)]
        return overwrite(x, values.reshape(box), starts)
    rows, inner = _rows(x.shape, dims, indices, position)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(rows.ndim, rows.ndim + len(inner))), inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    table, at = x.reshape((-1, *inner)), lax.expand_dims(rows, (rows.ndim,))
    done = _SCATTERS[how](table, at, values, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
    return done.reshape(x.shape)


_HOW = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _identity(how: str, dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    if how in ("add", "mul"):
        return np.asarray(how == "mul", dtype)
    if dtype.kind == "b":
        return np.asarray(how == "min", dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.asarray(info.min if how == "max" else info.max, dtype)
    return np.asarray(-np.inf if how == "max" else np.inf, dtype)


def reduce_at(
    x: Any, dims: tuple[int, ...], at: Any, position: int, values: Any, reduce: str, include_self: bool
) -> Any:
    """torch's scatter reductions: sum, mean, prod, amax or amin, with or without the old value of a hit element.

    The layout is that of `put_at` with one index. An element that is not hit keeps its value; a mean of integers is
    rounded down.
    """
    how, dtype = _HOW[reduce], x.dtype
    if not include_self:
        x = put_at(x, dims, [at], position, spread(_identity(how, x.dtype), values.shape), "set")
    total = put_at(x, dims, [at], position, values, how)
    if reduce != "mean":
        return total
    ones = spread(np.ones((), np.int64), values.shape)
    count = put_at(lax.full(x.shape, np.int64(include_self)), dims, [at], position, ones, "add")
    count = lax.max(count, np.int64(1))
    if kind(total) == "f":
        return total / count.astype(dtype)
    if kind(total) == "c":  # with the rounding of eager's division, which multiplies by the reciprocal
        part = 1 / count.astype(lax.real(total).dtype)
        return lax.complex(lax.real(total) * part, lax.imag(total) * part)
    wide = total.astype(np.int64)
    return (lax.div(wide, count) - (lax.rem(wide, count) < 0)).astype(dtype)


def flat_positions(shape: Sequence[int], dim: int, index: Any) -> Any:
    """Where `torch.gather(x, dim, index)` reads an `x` of `shape`: row-major positions."""
    flat = None
    for d in range(len(shape)):
        term = (index if d == dim else iota(index.shape, d)) * math.prod(shape[d + 1 :])
        flat = term if flat is None else flat + term
    return flat


def spread_line(x: Any, shape: Sequence[int]) -> Any:
    """Broadcast an array with dimensions of size 1 to `shape`, of the same rank."""
    return lax.broadcast_in_dim(x, tuple(shape), tuple(range(len(shape))))


def hits(shape: Sequence[int], dim: int, index: Any) -> Any | None:
    """Where an array of `shape` is reached by `index`, as a bool array, if each of its lines has just one index.

    A write is then a pointwise select, which fuses with its neighbours; None if it takes a scatter.
    """
    if any(n != (1 if d == dim else size) for d, (n, size) in enumerate(zip(index.shape, shape, strict=True))):
        return None
    return iota(shape, dim) == spread_line(index, shape)


def rank(mask: Any) -> Any:
    """For each true element of a bool array its number among the true ones, row-major from 0, as flat int32.

    Lanes of consecutive elements are counted side by side: XLA's own cumulative sum over a million elements takes
    five times as long.
    """
    n = mask.size
    lanes = 256 if n >= 1 << 14 else 1
    flat = mask.reshape(-1).astype(np.int32)
    if n % lanes:
        flat = lax.pad(flat, np.zeros((), np.int32), [(0, -n % lanes, 0)])
    if lanes == 1:
        return lax.cumsum(flat) - 1

    def step(count: Any, row: Any) -> tuple[Any, Any]:
        return count + row, count + row

    totals, counts = lax.scan(step, zeros((lanes,), np.int32), flat.reshape(lanes, -1).T)
    before = lax.cumsum(totals) - totals
    return (counts.T + before[:, None]).reshape(-1)[:n] - 1


# c10's names of the types that a Python number may fail to fit.
_C10_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.int64: "int64_t",
    torch.int32: "int", torch.int16: "int16_t", torch.int8: "int8_t", torch.uint8: "uint8_t",
    torch.complex64: "c10::complex<float>",
}
_NARROW = (torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8)  # too small for some int64


def fill_value(cx: Context, value: Any, dtype: torch.dtype) -> Any:
    """A number (Python's or hoisted) as a 0-d array of `dtype`, checked as eager does before it fills with it.

    Raises:
        NoLowering: a Python number that does not fit: eager raises.
    """
    want = JAX_DTYPE[dtype]
    have = np.dtype(type(value) if isinstance(value, NUMBERS) else value.dtype)
    sure = have == want or have.kind in "bc" or (have.kind in "iu" and dtype not in _NARROW)
    if dtype in _C10_NAMES and not sure:
        v = np.float64(value.real) if isinstance(value, NUMBERS) else value.astype(np.float64)
        if want.kind in "iu":
            info = np.iinfo(want)
            # A negative integer may wrap around into an unsigned dtype, a negative float may not.
            low = -info.max if info.min == 0 and have.kind in "iu" else info.min
            bad = ~((v >= float(low)) & (v <= float(info.max)))
        else:
            limit = torch.finfo(dtype).max
            bad = (abs(v) > limit) & (abs(v) != np.inf)
        if not isinstance(value, NUMBERS):
            message = f"value cannot be converted to type {_C10_NAMES[dtype]} without overflow"
            cx.check(bad, "RuntimeError", message)
        elif bool(bad):
            raise NoLowering(f"{value} does not fit {dtype}: eager raises")
    return as_array(value, want) if isinstance(value, NUMBERS) else convert(value, dtype)
