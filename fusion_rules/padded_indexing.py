"""Rows of padded values for primitives that read and write at places which are values (`padded` has the words)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax.lax import GatherScatterMode

from .padded import Answer, Call, Fill, Form, Refused, aligned, fixed, fronted, join, same, sizes, varies


def _unpromised(c: Call, indices: Form) -> None:
    if any(map(varies, indices)) and (c.high.get("unique_indices") or c.high.get("indices_are_sorted")):
        raise Refused("something is promised of its indices")


def _gather(c: Call) -> Answer:
    same(c, "slice_sizes")
    operand, indices = c.operands
    n = c.high["dimension_numbers"]
    if varies(indices[-1]):
        raise Refused("how many places are picked at once depends on the size")
    _unpromised(c, indices)
    by_rows = list(zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True))
    (rows, indices), spreads = aligned(c, [[(0, a), (1, b)] for a, b in by_rows])
    operand, more = fronted(c, 0, n.collapsed_slice_dims)
    operand = tuple([rows[a] if a in n.operand_batching_dims else axis for a, axis in enumerate(operand)])
    for a, b in by_rows:
        join(operand[a], indices[b])
    window = []
    for a, axis in enumerate(operand):
        if a in n.operand_batching_dims:
            continue
        whole = (c.high["slice_sizes"][a], c.low["slice_sizes"][a]) == sizes(axis)
        if a in n.collapsed_slice_dims:
            continue
        if not varies(axis):
            window.append(fixed(c.high["slice_sizes"][a]))
        elif whole and a not in n.start_index_map:
            window.append(axis)
        else:
            raise Refused("a part of it is picked")
    batch, parts = iter(indices[:-1]), iter(window)
    found = [next(parts) if a in n.offset_dims else next(batch) for a in range(len(c.shapes[0][0]))]
    return Answer([tuple(found)], spreads=[*spreads, *more])


def _scatter(c: Call) -> Answer:
    same(c)
    n = c.high["dimension_numbers"]
    if varies(c.operands[1][-1]):
        raise Refused("how many places are written at once depends on the size")
    rows = [a for a in range(len(c.operands[2])) if a not in n.update_window_dims]  # one for each axis of the indices
    (_, indices, updates), spreads = aligned(c, [[(1, b), (2, u)] for b, u in enumerate(rows)])
    _unpromised(c, indices)
    for b, u in enumerate(rows):
        join(indices[b], updates[u])
    form, more = fronted(c, 0, n.inserted_window_dims)
    made = list(form)
    for a, b in zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True):
        made[a] = join(made[a], indices[b])
    parts = [a for a in range(len(made)) if a not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    for a, w in zip(parts, n.update_window_dims, strict=True):
        if varies(made[a]) or varies(updates[w]):
            if a in n.scatter_dims_to_operand_dims or sizes(made[a]) != sizes(updates[w]):
                raise Refused("a part of it is written")
            made[a] = join(made[a], updates[w])
    for a in (*n.inserted_window_dims, *n.operand_batching_dims):
        made[a] = tuple([f._replace(uniform=False) for f in made[a]])
    drops = GatherScatterMode.from_any(c.high["mode"]) is GatherScatterMode.FILL_OR_DROP
    if any(varies(made[a]) for a in n.inserted_window_dims) and not drops:
        raise Refused("a place beyond the size is moved to its end")
    return Answer([tuple(made)], _without_effect(c, indices, updates, rows, drops), spreads=[*spreads, *more])


def _without_effect(c: Call, indices: Form, updates: Form, rows: list[int], drops: bool) -> list[Fill]:
    """What keeps writes that are not valid from showing: zeros to add, or places behind the end, which are dropped."""
    if c.name == "scatter-add":
        over = tuple([u for u in rows if varies(updates[u])])
        return [Fill(2, over, 0)] if over else []
    over = tuple([b for b in range(len(rows)) if varies(join(indices[b], updates[rows[b]]))])
    beyond = max([sizes(axis)[0] for axis in c.operands[0]], default=0)
    if over and (not drops or np.iinfo(c.dtypes[1]).max < beyond):
        raise Refused("a place behind the end is none that is dropped")
    return [Fill(1, over, beyond)] if over else []


INDEXING: dict[str, Callable[[Call], Answer]] = {
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
}
