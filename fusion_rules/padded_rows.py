"""Rows of padded values: for each of JAX's primitives, what is valid of its results (`padded` has the words)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .padded import (
    Answer,
    Axis,
    Call,
    Clamp,
    Factor,
    Fill,
    Join,
    Keep,
    Refused,
    Spread,
    Start,
    Turn,
    aligned,
    fixed,
    fronted,
    join,
    joined,
    new,
    plain,
    same,
    sizes,
    varies,
)
from .padded_indexing import INDEXING
from .rowwise import ELEMENTWISE


def _elementwise(c: Call) -> Answer:
    same(c, "sharding")
    rank = max((len(form) for form in c.operands), default=0)
    met = [[(at, a) for at, form in enumerate(c.operands) if form] for a in range(rank)]
    forms, spreads = aligned(c, met)
    return Answer([joined(forms)] * len(c.shapes), spreads=spreads)


def _of_dtype(what: str, dtype: np.dtype) -> Any:
    """The least or the largest number of a dtype."""
    if dtype == np.bool_:
        return what == "largest"
    if np.issubdtype(dtype, np.integer):
        return (np.iinfo(dtype).min, np.iinfo(dtype).max)[what == "largest"]
    if np.issubdtype(dtype, np.complexfloating):
        raise Refused("complex numbers have no order")
    return -np.inf if what == "least" else np.inf


NEUTRAL: dict[str, Callable[[np.dtype], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lambda dtype: _of_dtype("least", dtype),
    "min": lambda dtype: _of_dtype("largest", dtype),
    "and": lambda dtype: True if dtype == np.bool_ else -1,
    "or": lambda dtype: 0,
    "logsumexp": lambda dtype: -np.inf,
}


def _reduction(c: Call) -> Answer:
    same(c, "sharding", "out_sharding")
    (form,), axes = c.operands, c.high["axes"]
    over = tuple([a for a in axes if varies(form[a])])
    fills = [Fill(0, over, NEUTRAL[c.name.removeprefix("reduce_")](c.dtypes[0]))] if over else []
    return Answer([tuple([axis for a, axis in enumerate(form) if a not in axes])], fills)


def _argument(c: Call) -> Answer:
    same(c)
    axes = c.high["axes"]
    form, spreads = fronted(c, 0, axes)
    over = tuple([a for a in axes if varies(form[a])])
    value = NEUTRAL[c.name.removeprefix("arg")]
    fills = [Fill(0, over, value(c.dtypes[0]))] if over else []
    return Answer([tuple([axis for a, axis in enumerate(form) if a not in axes])], fills, spreads=spreads)


def _cumulative(c: Call) -> Answer:
    same(c)
    axis = c.high["axis"]
    form, spreads = fronted(c, 0, [axis])
    if not varies(form[axis]):
        return Answer([form])
    fills = [Fill(0, (axis,), NEUTRAL[c.name.removeprefix("cum")](c.dtypes[0]))] if c.high["reverse"] else []
    made = (*form[:axis], tuple([f._replace(uniform=False) for f in form[axis]]), *form[axis + 1 :])
    return Answer([made], fills, spreads=spreads)


def _broadcast(c: Call) -> Answer:
    same(c, "shape", "sharding")
    (form,), (shape,) = c.operands[:1], c.shapes
    if len(c.operands) > 1:
        raise Refused("a size is known only when it runs")
    made = list(new(shape, uniform=True))
    for a, to in enumerate(c.high["broadcast_dimensions"]):
        if sizes(form[a]) == (shape[0][to], shape[1][to]):
            made[to] = form[a]
        elif sizes(form[a]) != (1, 1):
            raise Refused("what is spread is of another size")
    return Answer([tuple(made)])


def _reshape(c: Call) -> Answer:
    same(c, "new_sizes", "sharding")
    if c.high["dimensions"] is not None or len(c.operands) > 1:
        raise Refused("a reshape in another order")
    operand, spreads = c.operands[0], []
    for a, factors in _split_axes(c):
        spreads.append(Spread(0, a, factors))
        operand = (*operand[:a], factors, *operand[a + 1 :])
    rest = [f for axis in operand for f in axis if (f.high, f.low) != (1, 1)]
    made: list[Axis] = []
    for high, low in zip(*c.shapes[0], strict=True):
        taken: list[Factor] = []
        while (high, low) != (1, 1):
            if not rest:
                raise Refused("a reshape of another size")
            f = rest.pop(0)
            if high % f.high or low % f.low:
                f, behind = _split(f, high, low)
                rest.insert(0, behind)
            taken.append(f)
            high, low = high // f.high, low // f.low
        made.append(tuple(taken) or fixed(1))
    if rest:
        raise Refused("a reshape of another size")
    return Answer([tuple(made)], spreads=spreads)


def _split_axes(c: Call) -> list[tuple[int, Axis]]:
    """The axes that are valid from their front and become several, of which the first is fixed: with these."""
    found, at, results = [], 0, list(zip(*c.shapes[0], strict=True))
    for a, axis in enumerate(c.operands[0]):
        high, low, parts = 1, 1, []
        while at < len(results) and (high, low) != sizes(axis) and high <= sizes(axis)[0]:
            parts.append(Factor(*results[at]))
            high, low, at = high * results[at][0], low * results[at][1], at + 1
        if (high, low) != sizes(axis):
            break  # several become one, or nobody knows
        factors = plain(tuple(parts)) if parts else ()
        if len(axis) > 1 or not axis[0].varies or axis[0].uniform:
            continue
        if len(factors) > 1 and not factors[0].varies:
            found.append((a, factors))
    return found


def _split(f: Factor, high: int, low: int) -> tuple[Factor, Factor]:
    """A factor as two, of which the first is of these sizes."""
    if f.high % high or f.low % low:
        raise Refused("a reshape that takes an axis apart")
    inner = f.high // high, f.low // low
    if inner[0] != inner[1] and not f.uniform:
        raise Refused("a reshape that takes an axis apart, from its end")
    return Factor(high, low, f.uniform), Factor(*inner, f.uniform)


def _transpose(c: Call) -> Answer:
    same(c)
    return Answer([tuple([c.operands[0][a] for a in c.high["permutation"]])])


def _squeeze(c: Call) -> Answer:
    same(c)
    return Answer([tuple([axis for a, axis in enumerate(c.operands[0]) if a not in c.high["dimensions"]])])


def _iota(c: Call) -> Answer:
    same(c, "shape", "sharding")
    made = list(new(c.shapes[0], uniform=True))
    at = c.high["dimension"]
    made[at] = tuple([f._replace(uniform=False) for f in made[at]])
    return Answer([tuple(made)])


def _dot(c: Call) -> Answer:
    same(c, "out_sharding")
    (left, right), (left_batch, right_batch) = c.high["dimension_numbers"]
    met = [[(0, x), (1, y)] for x, y in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True))]
    (a, b), spreads = aligned(c, met)
    batch = [join(a[x], b[y]) for x, y in zip(left_batch, right_batch, strict=True)]
    fills = []
    for x, y in zip(left, right, strict=True):
        if varies(join(a[x], b[y])):
            # Both: what is not valid may be no number, which a zero on the other side would not take away.
            fills += [Fill(0, (x,), 0), Fill(1, (y,), 0)]
    free = [axis for x, axis in enumerate(a) if x not in (*left, *left_batch)]
    free += [axis for y, axis in enumerate(b) if y not in (*right, *right_batch)]
    return Answer([(*batch, *free)], fills, spreads=spreads)


def _concatenate(c: Call) -> Answer:
    same(c)
    at = c.high["dimension"]
    if any(varies(form[at]) and len(plain(form[at])) > 1 for form in c.operands):
        raise Refused("rows that are valid in part are put behind each other")
    follows = any(varies(form[at]) for form in c.operands[:-1])
    parts = tuple([Factor(*sizes(form[at])) for form in c.operands])
    whole = new(c.shapes[0])[at]
    split = [(*form[:at], fixed(1), *form[at + 1 :]) for form in c.operands]
    found = joined(split)
    return Answer([(*found[:at], whole, *found[at + 1 :])], instead=Join(at, parts) if follows else None)


def _slice(c: Call) -> Answer:
    same(c, "start_indices", "limit_indices")
    cut = [a for a, n in enumerate(c.operands[0]) if (c.shapes[0][0][a], c.shapes[0][1][a]) != sizes(n)]
    (form, spreads), made, start = fronted(c, 0, cut), [], None
    strides = c.high["strides"] or (1,) * len(form)
    ends = [c.high["start_indices"], c.high["limit_indices"], c.low["start_indices"], c.low["limit_indices"]]
    for a, (axis, stride, begin, end, low_begin, low_end) in enumerate(zip(form, strides, *ends, strict=True)):
        high, low = sizes(axis)
        if (begin, end, low_begin, low_end, stride) == (0, high, 0, low, 1):
            made.append(axis)
        elif not varies(axis):
            if (begin, end) != (low_begin, low_end) and (begin != low_begin or stride != 1):
                raise Refused("a part of an axis depends on the size")
            made.append((Factor(-(-(end - begin) // stride), -(-(low_end - low_begin) // stride)),))
        elif stride != 1:
            raise Refused("every so many of it")
        elif begin == low_begin:  # valid as far as the axis is, and no further
            made.append((Factor(end - begin, low_end - low_begin, axis[0].uniform),))
            if end == low_end and end > low:
                raise Refused("a part that is longer than the size")
        elif end - begin == low_end - low_begin and start is None:
            made.append(fixed(end - begin))
            start = Start(a, begin, low_begin)
        else:
            raise Refused("a part of an axis begins at another place")
    return Answer([tuple(made)], (), start, spreads)


def _pad(c: Call) -> Answer:
    same(c, "padding_config")
    form, made, fills = c.operands[0], [], []
    configs = zip(c.high["padding_config"], c.low["padding_config"], strict=True)
    for a, (axis, ((low, high, inside), (low_low, low_high, low_inside))) in enumerate(zip(form, configs, strict=True)):
        if (low, inside) != (low_low, low_inside):
            raise Refused("where it begins in what is padded depends on the size")
        if not (low or high or inside or low_high):
            made.append(axis)
            continue
        if varies(axis) and (inside or len(plain(axis)) > 1):
            raise Refused("rows that are valid in part are taken apart")
        if varies(axis) and max(high, low_high) > 0:  # behind what is valid, as much as the largest has room for
            fills.append(a)
        made.append(new(c.shapes[0])[a])
    return Answer([tuple(made)], [Fill(0, tuple(fills), None)] if fills else [])


def _sort(c: Call) -> Answer:
    same(c)
    found = joined(c.operands)
    if varies(found[c.high["dimension"]]):
        raise Refused("a sort along it")
    return Answer([found] * len(c.shapes))


def _reverse(c: Call) -> Answer:
    same(c)
    form, turned = c.operands[0], [a for a in c.high["dimensions"] if varies(c.operands[0][a])]
    if any(len(plain(form[a])) > 1 for a in turned):
        raise Refused("rows that are valid in part are turned round")
    axes = [(a, Factor(*sizes(form[a])) if a in turned else None) for a in c.high["dimensions"]]
    return Answer([form], instead=Turn(tuple(axes)) if turned else None)


def _top(c: Call) -> Answer:
    same(c)
    form = c.operands[0]
    if varies(form[-1]) or c.high.get("axis", -1) not in (-1, len(form) - 1):
        raise Refused("the largest along it")
    return Answer([(*form[:-1], fixed(c.shapes[0][0][-1]))] * 2)


def _stack(c: Call) -> Answer:
    same(c)
    at, found = c.high["axis"], joined(c.operands)
    return Answer([(*found[:at], fixed(len(c.operands)), *found[at:])])


def _moving_part(c: Call) -> Answer:
    same(c, "slice_sizes")
    writes = c.name == "dynamic_update_slice"
    parts = c.operands[1] if writes else new(c.shapes[0])
    cut = [a for a, part in enumerate(parts) if sizes(part) != sizes(c.operands[0][a])]
    (form, spreads), made, clamps, kept = fronted(c, 0, cut), [], [], []
    for a, (axis, part) in enumerate(zip(form, parts, strict=True)):
        if not varies(axis):
            made.append(axis if writes else part)
            if varies(part):
                if len(plain(part)) > 1:
                    raise Refused("rows that are valid in part are written")
                kept.append((a, Factor(*sizes(part)), Factor(*sizes(axis))))
        elif sizes(part) == sizes(axis):
            made.append(join(axis, part) if writes else axis)
        elif varies(part):
            if len(plain(part)) > 1:
                raise Refused("rows that are valid in part are written")
            made.append((Factor(*sizes(axis)),) if writes else part)
            kept.append((a, Factor(*sizes(part)), Factor(*sizes(axis))))
        else:
            made.append((Factor(*sizes(axis)),) if writes else part)
            clamps.append(Clamp((2 if writes else 1) + a, Factor(*sizes(axis)), sizes(part)[0]))
    return Answer([tuple(made)], (), Keep(tuple(kept)) if kept else None, spreads, clamps)


def _split_up(c: Call) -> Answer:
    same(c)
    form, at = c.operands[0], c.high["axis"]
    if varies(form[at]):
        raise Refused("it is taken apart")
    return Answer([(*form[:at], fixed(high[at]), *form[at + 1 :]) for high, _ in c.shapes])


def _convolution(c: Call) -> Answer:
    same(c)
    (left, right), form = c.operands, c.high["dimension_numbers"]
    lhs, rhs, out = form.lhs_spec, form.rhs_spec, form.out_spec
    if any(varies(left[a]) for a in lhs[2:]) or any(varies(right[a]) for a in (rhs[0], *rhs[2:])):
        raise Refused("a convolution goes along it")
    made, fills = list(new(c.shapes[0])), []
    if c.high["batch_group_count"] > 1 and varies(left[lhs[0]]):
        raise Refused("a convolution in groups of it")
    made[out[0]] = left[lhs[0]]
    if varies(left[lhs[1]]) or varies(right[rhs[1]]):
        if c.high["feature_group_count"] > 1:
            raise Refused("a convolution in groups of it")
        join(left[lhs[1]], right[rhs[1]])
        fills = [Fill(0, (lhs[1],), 0), Fill(1, (rhs[1],), 0)]
    return Answer([tuple(made)], fills)


def _window(c: Call) -> Answer:
    same(c)
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    for a, axis in enumerate(c.operands[0]):
        parts = [c.high[name][a] for name in names if name in c.high]
        if varies(axis) and (set(parts) != {1} or tuple(c.high["padding"][a]) != (0, 0)):
            raise Refused("a window goes along it")
    kept = [axis if varies(axis) else made for axis, made in zip(c.operands[0], new(c.shapes[0]), strict=True)]
    return Answer([tuple(kept)] * len(c.shapes))


ROWS: dict[str, Callable[[Call], Answer]] = {
    **dict.fromkeys((*ELEMENTWISE, "add_any"), _elementwise),
    **dict.fromkeys((f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")), _reduction),
    **dict.fromkeys(("argmax", "argmin"), _argument),
    **dict.fromkeys(("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"), _cumulative),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "iota": _iota,
    "dot_general": _dot,
    "concatenate": _concatenate,
    "slice": _slice,
    "pad": _pad,
    "sort": _sort,
    "rev": _reverse,
    "split": _split_up,
    "stack": _stack,
    "dynamic_slice": _moving_part,
    "dynamic_update_slice": _moving_part,
    "top_k": _top,
    **INDEXING,
    "conv_general_dilated": _convolution,
}


def answer(call: Call) -> Answer:
    """What a primitive does with values that are valid in part.

    Raises:
        Refused: nobody knows, or it mixes what is valid with what is not.
    """
    if not any(varies(axis) for form in call.operands for axis in form) and all(h == low for h, low in call.shapes):
        same(call)
        return Answer([new(shape) for shape in call.shapes])
    row = ROWS.get(call.name)
    if row is None:
        raise Refused(f"nothing is known of {call.name}")
    return row(call)
