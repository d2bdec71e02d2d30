"""Strided views as XLA expressions: reading one out of a storage's value, and writing one back into it.

A storage's value travels through a region as its *home*: a dense row-major array that starts at the storage's first
byte. torch's views are `(size, stride, offset)` over that storage. Recovering slices and transposes from the strides,
instead of recording the chain of view ops, gives views of views, `as_strided` and `.T` of a slice one canonical form:
two programs that reach the same bytes by different view ops get the same region.

`plan_view` is static and memoised; `read` and `write` turn the plan into JAX operations.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .deferred import jax, jnp, lax
from .spec import JAX_DTYPE, TORCH_DTYPE, Spec


class Geometry(NamedTuple):
    """A strided view over a storage. `offset` counts elements of `dtype`; conj and neg are torch's lazy bits."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @property
    def is_by_columns(self) -> bool:
        """Whether it is a matrix whose columns lie together, one after the other."""
        return len(self.size) == 2 and self.stride[0] == 1 and self.stride[1] >= self.size[0] > 1


@dataclass(frozen=True, slots=True)
class ViewPlan:
    """How a geometry is cut out of a flat array of `n` elements.

    `order` lists the view's dimensions of size > 1 and stride > 0 by falling stride. With `factors`, the flat array
    reshaped to them holds the view as the box `starts, extents`, in which some of the dimensions may be one; without,
    it takes a gather.
    """

    size: tuple[int, ...]
    order: tuple[int, ...]
    factors: tuple[int, ...] | None
    starts: tuple[int, ...]
    extents: tuple[int, ...]
    flat_needed: int
    covers: bool

    @property
    def own_extents(self) -> tuple[int, ...]:
        """The view's own extents in that order: those of the box, unless it has several of them in one."""
        return tuple(self.size[d] for d in self.order)


def home_shape(spec: Spec) -> tuple[int, ...]:
    """The dimensions of a dense tensor in the order in which they lie in memory, size-1 dimensions left out."""
    order = sorted((d for d in range(len(spec.shape)) if spec.shape[d] != 1), key=lambda d: (-spec.strides[d], d))
    return tuple(spec.shape[d] for d in order)


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a view touches one gapless block of memory, each element once (torch: non-overlapping and dense)."""
    expected = 1
    for st, sz in sorted((st, sz) for sz, st in zip(size, stride, strict=True) if sz != 1):
        if st != expected:
            return sz == 0 or 0 in size
        expected *= sz
    return True


def overlaps_itself(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two indices of a view may reach one element (torch's conservative test: strides cover their extents)."""
    if 0 in size:
        return False
    reach = 0
    for st, sz in sorted((st, sz) for sz, st in zip(size, stride, strict=True) if sz != 1):
        if st <= reach:
            return True
        reach += st * (sz - 1)
    return False


@functools.lru_cache(maxsize=8192)
def plan_view(n: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> ViewPlan:
    """Plan a view of `size, stride, offset` over a flat array of `n` elements."""
    dims = [d for d in range(len(size)) if size[d] != 1 and stride[d] != 0]
    order = tuple(sorted(dims, key=lambda d: (-stride[d], d)))
    steps = [(size[d], stride[d]) for d in order]
    gather = ViewPlan(size, order, None, (), tuple(size[d] for d in order), n, False)
    if 0 in size:
        return gather
    if not steps:
        return ViewPlan(size, order, (n,), (offset,), (1,), n, n == 1)
    # A part of a dimension may have become several (49 rows of 50, as 7 of 7): these are no box, and as one they are.
    ones = [i for i in range(1, len(steps)) if steps[i - 1][1] == steps[i][0] * steps[i][1]]
    ways = (joined for count in range(len(ones) + 1) for joined in itertools.combinations(ones, count))
    plans = (_boxed(n, size, order, _joined(steps, joined), offset) for joined in ways)
    return next((plan for plan in plans if plan is not None), gather)


def _joined(steps: Sequence[tuple[int, int]], at: Sequence[int]) -> list[tuple[int, int]]:
    """Extents and strides, in which those at some places are one with what is before them."""
    joined: list[tuple[int, int]] = []
    for i, (extent, step) in enumerate(steps):
        joined.append((joined.pop()[0] * extent, step) if i in at else (extent, step))
    return joined


def _boxed(
    n: int, size: tuple[int, ...], order: tuple[int, ...], steps: Sequence[tuple[int, int]], offset: int
) -> ViewPlan | None:
    """The plan of a view with these extents and strides as a box; None if it is none."""
    extents, strides = tuple(extent for extent, _ in steps), [step for _, step in steps]
    if any(a % b or a == b for a, b in zip(strides, strides[1:], strict=False)):
        return None
    rest, starts = offset, []
    for step in strides:
        starts.append(rest // step)
        rest %= step
    factors = [a // b for a, b in zip(strides, strides[1:], strict=False)]
    if any(s + e > f for s, e, f in zip(starts[1:], extents[1:], factors, strict=True)):
        return None
    rows = starts[0] + extents[0]
    if n % strides[0] == 0:
        rows = n // strides[0]
    full, box = (rows, *factors, strides[-1]), (*extents, 1)
    whole = offset == 0 and strides[-1] == 1 and math.prod(full) == n and box == full
    return ViewPlan(size, order, full, (*starts, rest), box, rows * strides[0], whole)


def _flat_to_box(flat: jax.Array, plan: ViewPlan) -> jax.Array:
    assert plan.factors is not None
    if flat.size < plan.flat_needed:
        flat = lax.pad(flat, np.zeros((), flat.dtype), [(0, plan.flat_needed - flat.size, 0)])
    elif flat.size > plan.flat_needed:
        flat = lax.slice(flat, (0,), (plan.flat_needed,))
    return flat.reshape(plan.factors)


# Most views are whole arrays as they lie, and an equation that changes nothing takes as long to trace and to lower as
# another.
def _shaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x if x.shape == shape else lax.reshape(x, shape)


def _transposed(x: jax.Array, order: Sequence[int]) -> jax.Array:
    return x if list(order) == list(range(x.ndim)) else lax.transpose(x, tuple(order))


def _view_dims(plan: ViewPlan, sorted_values: jax.Array) -> jax.Array:
    """Put the dimensions back into the view's order, and broadcast those of size 1 or stride 0."""
    positions = {d: i for i, d in enumerate(plan.order)}
    kept = [d for d in range(len(plan.size)) if d in positions]
    values = _transposed(sorted_values, [positions[d] for d in kept])
    return values if values.shape == plan.size else lax.broadcast_in_dim(values, plan.size, tuple(kept))


def _flat_index(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> jax.Array:
    index = jnp.full(size, offset, jnp.int64)
    for d, st in enumerate(stride):
        index = index + lax.broadcasted_iota(jnp.int64, size, d) * st
    return index


def reinterpret(flat: jax.Array, dtype: torch.dtype) -> jax.Array:
    """The bytes of a flat array as a flat array of another dtype (`Tensor.view(dtype)`, `view_as_real`)."""
    want = JAX_DTYPE[dtype]
    have = np.dtype(flat.dtype)
    if have == want:
        return flat
    if have.kind == "c":
        parts = jnp.stack([flat.real, flat.imag], -1).reshape(-1)
        return reinterpret(parts, dtype)
    if want.kind == "c":
        part = torch.float32 if want.itemsize == 8 else torch.float64
        pairs = reinterpret(flat, part).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1])
    # XLA has no bitcast for predicates; torch stores them as bytes 0 and 1.
    if have.kind == "b":
        return reinterpret(flat.astype(jnp.uint8), dtype)
    if want.kind == "b":
        return reinterpret(flat, torch.uint8) != 0
    if want.itemsize > have.itemsize:
        flat = flat.reshape(-1, want.itemsize // have.itemsize)
    return lax.bitcast_convert_type(flat, want).reshape(-1)


def read(home: jax.Array, g: Geometry) -> jax.Array:
    """The view `g` of a storage whose value is `home`: an array of shape `g.size` and dtype `g.dtype`."""
    n = home.size * np.dtype(home.dtype).itemsize // g.dtype.itemsize
    plan = plan_view(n, g.size, g.stride, g.offset)
    same = np.dtype(home.dtype) == JAX_DTYPE[g.dtype]
    if plan.covers and same:
        out = _view_dims(plan, _shaped(home, plan.own_extents))
    else:
        flat = reinterpret(home.reshape(-1), g.dtype)
        if 0 in g.size:
            out = jnp.zeros(g.size, flat.dtype)
        elif plan.factors is None:
            out = flat.at[_flat_index(g.size, g.stride, g.offset)].get(mode="promise_in_bounds")
        else:
            stops = tuple(s + e for s, e in zip(plan.starts, plan.extents, strict=True))
            box = lax.slice(_flat_to_box(flat, plan), plan.starts, stops)
            out = _view_dims(plan, _shaped(box, plan.own_extents))
    if g.conj:
        out = jnp.conj(out)
    return -out if g.neg else out


_DISJOINT: ContextVar[bool] = ContextVar("disjoint", default=False)


@contextmanager
def disjoint(known: bool) -> Iterator[None]:
    """In the body, whether what is written into an array is known not to be computed from that array elsewhere."""
    token = _DISJOINT.set(known)
    try:
        yield
    finally:
        _DISJOINT.reset(token)


def overwrite(x: jax.Array, part: jax.Array, starts: Sequence[Any]) -> jax.Array:
    """`x` with `part` written at `starts`, moved inside where they are not: a `lax.dynamic_update_slice` that is right.

    XLA:CPU fuses the part's computation with the update and then writes in place while it reads (openxla/xla#49176:
    `x[1:] = x[:-1]` repeats its first row), because a reshape hides from it that both are the same array. So a part
    that may have been computed from `x` is selected, in one pass over `x`. The barrier keeps a reshape of the result
    from being moved to the operand; it is gone before anything is fused.
    """
    if _DISJOINT.get():
        return lax.optimization_barrier(lax.dynamic_update_slice(x, part, starts))
    inside = np.ones((), np.bool_)
    for d, (start, n, m) in enumerate(zip(starts, x.shape, part.shape, strict=True)):
        if m < n:
            first = lax.clamp(np.int64(0), jnp.asarray(start, jnp.int64), np.int64(n - m))
            place = lax.broadcasted_iota(jnp.int64, x.shape, d)
            inside = inside & (place >= first) & (place < first + m)
    spread = lax.dynamic_update_slice(jnp.zeros(x.shape, x.dtype), part, starts)
    return lax.select(jnp.broadcast_to(inside, x.shape), spread, x)


def write(home: jax.Array, g: Geometry, values: Any) -> jax.Array:
    """`home` with the view `g` overwritten by `values` (shape `g.size`). The view must not overlap itself."""
    return _written(home.shape, np.dtype(home.dtype), lambda: home, g, values)


def filled(shape: tuple[int, ...], dtype: torch.dtype, g: Geometry, values: Any) -> jax.Array:
    """A new home of zeros with the view `g`, most often all of it, overwritten by `values`."""
    have = JAX_DTYPE[dtype]
    return _written(shape, have, lambda: jnp.zeros(shape, have), g, values)


def _written(
    shape: tuple[int, ...], have: np.dtype[Any], home: Callable[[], jax.Array], g: Geometry, values: Any
) -> jax.Array:
    if 0 in g.size:
        return home()
    want = JAX_DTYPE[g.dtype]
    values = -values if g.neg else values
    values = jnp.conj(values) if g.conj else values
    if not isinstance(values, jax.Array) or values.dtype != want:
        values = jnp.asarray(values, want)
    plan = plan_view(math.prod(shape) * have.itemsize // want.itemsize, g.size, g.stride, g.offset)
    if plan.factors is not None:
        kept = sorted(plan.order)
        values = _transposed(_shaped(values, tuple(g.size[d] for d in kept)), [kept.index(d) for d in plan.order])
        if plan.covers and have == want:
            return _shaped(values, shape)
    flat = reinterpret(_shaped(home(), (math.prod(shape),)), g.dtype)
    if plan.factors is None:
        out = flat.at[_flat_index(g.size, g.stride, g.offset)].set(values, mode="promise_in_bounds")
    elif plan.covers:
        out = _shaped(values, (flat.size,))
    else:
        updated = overwrite(_flat_to_box(flat, plan), _shaped(values, plan.extents), plan.starts).reshape(-1)
        # A view that leaves a ragged tail: what lies behind the box was not part of the reshape.
        out = updated[: flat.size] if updated.size >= flat.size else jnp.concatenate([updated, flat[updated.size :]])
    if want != have:
        out = reinterpret(out, TORCH_DTYPE[have])
    return _shaped(out, shape)
