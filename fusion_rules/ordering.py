"""Orders of elements: sort keys, sorting by them, and searching in what is sorted."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .elementwise import isnan, kind, where
from .platforms import variants


def sort_key(x: Any) -> Any:
    """A signed integer per element, int32 or for 64-bit dtypes int64, that orders as torch sorts in rising order."""
    dtype = np.dtype(x.dtype)
    if kind(x) == "f":
        x = x.astype(np.float32) if dtype.itemsize < 4 else x
        word = np.dtype(f"int{8 * x.dtype.itemsize}")
        info = np.iinfo(word)
        bits = lax.bitcast_convert_type(where(x == 0, 0, x), word)
        bits = where(bits < 0, bits ^ np.asarray(info.max, word), bits)
        return where(isnan(x), np.asarray(info.max, word), bits)
    if dtype.kind == "u" and dtype.itemsize >= 4:
        word = np.dtype(f"int{8 * dtype.itemsize}")
        return lax.bitcast_convert_type(x, word) ^ np.asarray(np.iinfo(word).min, word)
    return x if dtype == np.int64 else x.astype(np.int32)


@variants
def stable_order(x: Any, axis: int, descending: bool = False) -> Any:
    """int64 positions along an axis (shorter than 2**32) that sort `x`; equal elements stay in their order."""
    key = sort_key(x)
    place = lax.broadcasted_iota(np.int32 if x.shape[axis] < 2**31 else np.int64, x.shape, axis)
    return lax.sort((~key if descending else key, place), dimension=axis, num_keys=1)[1].astype(np.int64)


def pick(x: Any, index: Any, axis: int) -> Any:
    """`x` at positions along one axis that are known to be inside."""
    return jnp.take_along_axis(x, index, axis, mode="promise_in_bounds")


def search(sequence: Any, values: Any, right: bool) -> Any:
    """Where values belong in sorted rows: `sequence` [n] for any `values`, or [..., n] for `values` [..., m].

    ATen's bisection step for step, so that NaN and unsorted rows give the same answer too. int64, shape of `values`.
    """
    n = sequence.shape[-1]
    if n == 0:
        return lax.full(values.shape, 0, np.int64)
    # Two bounds for each value: in 64 bits they take four times what values in float32 do.
    word = np.int32 if n < 2**30 else np.int64

    def halve(_: int, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = (low + high) >> 1
        # A finished search may stand at n: any element will do, its answer is not used.
        at = lax.min(middle, np.asarray(n - 1, word))
        found = sequence.at[at].get(mode="promise_in_bounds") if sequence.ndim == 1 else pick(sequence, at, -1)
        up = ~(found > values if right else found >= values)
        open_ = low < high
        return where(open_ & up, middle + 1, low), where(open_ & ~up, middle, high)

    ends = lax.full(values.shape, 0, word), lax.full(values.shape, n, word)
    return lax.fori_loop(0, n.bit_length(), halve, ends)[0].astype(np.int64)
