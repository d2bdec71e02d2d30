"""Padding: a region's function for the largest size of a bucket, made one for every size in it.

The function is traced at both ends of the bucket. What differs between the two traces is what depends on the size: of
shapes, which say what each value is valid of (`fusion_rules.padded_rows`), and of numbers, which have to be linear in
the size. All else has to be the same. Then the trace of the upper end is run, step by step, with what is behind the
valid part of a value filled where it would count, and numbers computed from the size, which is an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from fused_eager.fusion_rules.padded import (
    Answer,
    Axis,
    Call,
    Factor,
    Fill,
    Form,
    Join,
    Keep,
    Refused,
    Start,
    Turn,
    joined,
    new,
    sizes,
    varies,
)
from fused_eager.fusion_rules.padded_rows import answer

from .straight_line import Program, Step, flatten

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes from `low` to `high`."""

    high: int
    low: int

    def linear(self, high: float, low: float) -> tuple[int, int]:
        """A whole number of that is `high` and `low` at the ends, as (slope, rest).

        Raises:
            Refused: there is no such line through whole numbers.
        """
        slope, left = divmod(high - low, self.high - self.low)
        rest = high - slope * self.high
        if left or rest != int(rest):
            raise Refused("a number is not linear in the size")
        return int(slope), int(rest)

    def at(self, size: int, high: int, low: int) -> int:
        """What is `high` and `low` at the ends, at a size between them."""
        slope, rest = self.linear(high, low)
        return slope * size + rest


@dataclass(eq=False)
class Padded:
    """A function of padded arrays, its hoisted numbers and the size, which is the last of its whole numbers.

    `outputs` are the forms of its results.
    """

    bucket: Bucket
    program: Program
    flat: dict[int, list[Program]]
    answers: dict[int, Answer] = field(default_factory=dict)  # by a step's identity
    forms: dict[int, Form] = field(default_factory=dict)
    numbers: dict[tuple[int, int], tuple[Callable[[Any], Any], int, int]] = field(
        default_factory=dict
    )  # of a step's operands
    branches: dict[int, list[Padded]] = field(default_factory=dict)  # of conditions
    outputs: list[Form] = field(default_factory=list)

    def __call__(self, *arrays: Any) -> list[Any]:
        at = len(self.program.inputs) - 1
        size = arrays[at][-1]
        results = self.run([*arrays[:at], arrays[at][:-1]], size)
        for k, form in enumerate(self.outputs):
            for a, axis in enumerate(form):
                if varies(axis) and not _is_from_its_front(axis):
                    results[k] = self._moved(results[k], a, axis, size, by_factors=False)
        return results

    def run(self, given: Sequence[Any], size: Any) -> list[Any]:
        """The results, laid out as they are computed."""
        program = self.program
        values: dict[int, Any] = dict(zip(program.inputs, given, strict=True))
        values.update(program.constants)
        for step in program.steps:
            taken = [self._taken(step, k, v, values, size) for k, v in enumerate(step.inputs)]
            values.update(zip(step.outputs, self._run(step, taken, size), strict=True))
        return [values[v] if type(v) is int else jnp.asarray(v.val, v.aval.dtype) for v in program.outputs]

    def _taken(self, step: Step, k: int, v: Any, values: Mapping[int, Any], size: Any) -> Any:
        if type(v) is int:
            return values[v]
        line = self.numbers.get((id(step), k))
        if line is None:
            return jnp.asarray(v.val, v.aval.dtype)
        formula, slope, rest = line
        return formula(size * slope + rest).astype(v.aval.dtype)

    def _run(self, step: Step, taken: list[Any], size: Any) -> Sequence[Any]:
        found = self.answers.get(id(step))
        if found is not None:
            forms = [self._form(v) for v in step.inputs]
            for spread in found.spreads:
                form = forms[spread.at]
                axis = (Factor(*sizes(spread.factors)),) if spread.front else spread.factors
                forms[spread.at] = (*form[: spread.axis], axis, *form[spread.axis + 1 :])
                x = taken[spread.at]
                taken[spread.at] = self._moved(x, spread.axis, spread.factors, size, by_factors=not spread.front)
            for c in found.clamps:
                last = self._count(c.factor, size) - c.length
                taken[c.at] = jnp.minimum(taken[c.at], last.astype(taken[c.at].dtype))
            for fill in found.fills:
                taken[fill.at] = self._filled(forms[fill.at], fill, taken, size)
            if isinstance(found.instead, Start):
                return [self._cut(step, found.instead, taken[0], size)]
            if isinstance(found.instead, Join):
                return [self._put_together(step, found.instead, taken, size)]
            if isinstance(found.instead, Keep):
                return [self._part(step, found.instead, taken, size)]
            if isinstance(found.instead, Turn):
                return [self._turned(found.instead, taken[0], size)]
        branches = self.branches.get(id(step))
        if branches is not None:
            ways = [lambda size, *given, way=way: way.run(given, size) for way in branches]
            return lax.switch(taken[0].astype(jnp.int32), ways, size, *taken[1:])
        primitive = step.eqn.primitive
        made = primitive.bind(*taken, **step.eqn.params)
        return made if primitive.multiple_results else [made]

    def _filled(self, form: Form, fill: Fill, taken: Sequence[Any], size: Any) -> Any:
        x, valid = taken[fill.at], None
        for axis in fill.axes:
            here = lax.broadcast_in_dim(self._valid(form[axis], size), x.shape, (axis,))
            valid = here if valid is None else valid & here
        value = taken[1] if fill.value is None else fill.value
        return x if valid is None else jnp.where(valid, x, jnp.asarray(value, x.dtype))

    def _form(self, v: Any) -> Form:
        return self.forms[v] if type(v) is int else ()

    def _valid(self, axis: Axis, size: Any) -> Any:
        """Which places along an axis are valid."""
        shape, valid = tuple([f.high for f in axis]), jnp.ones((), bool)
        for k, f in enumerate(axis):
            if f.varies:
                valid = valid & (lax.broadcasted_iota(jnp.int64, shape, k) < self._count(f, size))
        return valid.reshape(math.prod(shape))

    def _moved(self, x: Any, at: int, axis: Axis, size: Any, by_factors: bool) -> Any:
        """A value whose axis `at`, valid from its front, is laid out by factors (`apart`), or the other way round."""
        counts = [self._count(f, size) for f in axis]
        high = [f.high for f in axis]
        place, source = jnp.arange(math.prod(high)), jnp.zeros((), jnp.int64)
        shape, strides = (high, counts) if by_factors else (counts, high)
        for k in range(len(axis)):
            index = place // jnp.asarray(math.prod(shape[k + 1 :])) % shape[k]
            source = source + index * math.prod(strides[k + 1 :])
        return jnp.take(x, source, axis=at, mode="clip")

    def _count(self, f: Factor, size: Any) -> Any:
        if not f.varies:
            return f.high
        slope, rest = self.bucket.linear(f.high, f.low)
        return size * slope + rest

    def _put_together(self, step: Step, join: Join, taken: Sequence[Any], size: Any) -> Any:
        made, at = jnp.zeros(step.shape, taken[0].dtype), jnp.zeros((), jnp.int64)
        for x, part in zip(taken, join.parts, strict=True):  # each over what is not valid of the one before
            made = lax.dynamic_update_slice_in_dim(made, x, at, join.axis)
            at = at + self._count(part, size)
        return made

    def _part(self, step: Step, keep: Keep, taken: Sequence[Any], size: Any) -> Any:
        writes = step.eqn.primitive.name == "dynamic_update_slice"
        x, *at = taken
        part = at.pop(0) if writes else None
        ends = [0] * x.ndim  # room for what is not valid of a part that ends where the value does
        for a, factor, whole in keep.parts:
            most = max(whole.high - factor.high, whole.low - factor.low)
            ends[a] = most + factor.high - whole.high
            at[a] = jnp.clip(at[a].astype(jnp.int64), 0, self._count(whole, size) - self._count(factor, size))
        places = [jnp.asarray(begin, jnp.int64) for begin in at]
        padded = jnp.pad(x, [(0, end) for end in ends])
        if part is None:
            return lax.dynamic_slice(padded, places, step.eqn.params["slice_sizes"])
        made = lax.dynamic_update_slice(padded, part, places)
        made = lax.slice(made, [0] * x.ndim, x.shape)
        for a, factor, _ in keep.parts:
            valid = jnp.arange(x.shape[a]) < at[a] + self._count(factor, size)
            made = jnp.where(lax.broadcast_in_dim(valid, x.shape, (a,)), made, x)
        return made

    def _turned(self, turn: Turn, x: Any, size: Any) -> Any:
        for a, factor in turn.axes:
            if factor is None:
                x = lax.rev(x, (a,))
            else:
                x = jnp.take(x, self._count(factor, size) - 1 - jnp.arange(factor.high), axis=a, mode="clip")
        return x

    def _cut(self, step: Step, start: Start, x: Any, size: Any) -> Any:
        params = step.eqn.params
        slope, rest = self.bucket.linear(start.high, start.low)
        length = params["limit_indices"][start.axis] - params["start_indices"][start.axis]
        x = lax.dynamic_slice_in_dim(x, size * slope + rest, length, start.axis)
        begin, end = list(params["start_indices"]), list(params["limit_indices"])
        begin[start.axis], end[start.axis] = 0, length
        return lax.slice(x, begin, end, params["strides"])


def _is_from_its_front(axis: Axis) -> bool:
    """Whether what is valid of an axis is one part, at its front."""
    varying = [k for k, f in enumerate(axis) if f.varies]
    return len(varying) == 1 and all(f.high == 1 for f in axis[: varying[0]])


def padded(
    high: ClosedJaxpr, low: ClosedJaxpr, middle: ClosedJaxpr, bucket: tuple[int, int, int], outputs: int
) -> Padded:
    """One function for all sizes of a bucket, from what was traced at its upper and its lower end and between them.
    `outputs` are its results that are values; what follows are the flags of checks.

    Raises:
        Refused: what is valid cannot be told from what is not, or something is not linear in the size.
    """
    upper = flatten(high)
    flat: dict[int, list[Program]] = {}
    made = _of_two(upper, flatten(low), Bucket(bucket[0], bucket[1]), outputs, flat)
    if _lines(made) != _lines(_of_two(upper, flatten(middle), Bucket(bucket[0], bucket[2]), outputs, flat)):
        raise Refused("something is not linear in the size")
    return made


def _lines(made: Padded) -> Any:
    """All that depends on the size, as functions of it."""
    line = made.bucket.linear

    def of(axis: Axis) -> Any:
        return [line(f.high, f.low) for f in axis]

    instead = {at: _line_of(made.bucket, a.instead) for at, a in made.answers.items() if a.instead}
    moved = {at: a.spreads for at, a in made.answers.items() if a.spreads}
    spreads = {at: [(s.at, s.axis, s.front, of(s.factors)) for s in found] for at, found in moved.items()}
    clamps = {at: [(c.at, of((c.factor,)), c.length) for c in a.clamps] for at, a in made.answers.items() if a.clamps}
    fills = {at: [(f.at, f.axes) for f in a.fills] for at, a in made.answers.items() if a.fills}
    inside = {at: list(map(_lines, ways)) for at, ways in made.branches.items()}
    forms = {v: list(map(of, form)) for v, form in made.forms.items()}
    return made.numbers, inside, forms, instead, spreads, clamps, fills


def _line_of(bucket: Bucket, what: Start | Join | Keep | Turn) -> Any:
    if isinstance(what, Start):
        return what.axis, bucket.linear(what.high, what.low)
    if isinstance(what, Join):
        return what.axis, [bucket.linear(f.high, f.low) for f in what.parts]
    if isinstance(what, Keep):
        return [(a, bucket.linear(f.high, f.low), bucket.linear(w.high, w.low)) for a, f, w in what.parts]
    return [(a, f and bucket.linear(f.high, f.low)) for a, f in what.axes]


def _of_two(
    upper: Program,
    lower: Program,
    bucket: Bucket,
    outputs: int,
    flat: dict[int, list[Program]],
    given: Sequence[Form] = (),
) -> Padded:
    """The function of two traces. `flat` are the branches of the upper one, by a step's identity; `given` are the forms
    of its arguments, where they are not valid from their front."""
    if len(upper.steps) != len(lower.steps):
        raise Refused("a smaller size is computed in other steps")
    made = Padded(bucket, upper, flat)
    twin = dict(zip(upper.inputs, lower.inputs, strict=True))
    constants = dict(zip(upper.constants, lower.constants, strict=len(upper.constants) == len(lower.constants)))
    for v, w in constants.items():
        if not _is_same(upper.constants[v], lower.constants[w]):
            raise Refused("a constant depends on the size")
        twin[v] = w
    for v, w in twin.items():
        made.forms[v] = new((upper.avals[v].shape, lower.avals[w].shape))
    made.forms.update(zip(upper.inputs, given, strict=False))
    for step, other in zip(upper.steps, lower.steps, strict=True):
        _follow(made, step, other, upper, lower, twin)
    for v, w in zip(upper.outputs, lower.outputs, strict=True):
        if type(v) is not type(w) or (twin[v] != w if type(v) is int else not _is_same(v.val, w.val)):
            raise Refused("a result depends on the size")
    made.outputs = [made._form(v) for v in upper.outputs[:outputs]]
    if any(varies(axis) for v in upper.outputs[outputs:] for axis in made._form(v)):
        raise Refused("a check depends on the size")
    return made


def _follow(made: Padded, step: Step, other: Step, upper: Program, lower: Program, twin: dict[int, int]) -> None:
    name = step.eqn.primitive.name
    if name != other.eqn.primitive.name or len(step.inputs) != len(other.inputs):
        raise Refused("a smaller size is computed in other steps")
    forms: list[Form] = []
    for k, (v, w) in enumerate(zip(step.inputs, other.inputs, strict=True)):
        if type(v) is not type(w):
            raise Refused("a smaller size is computed otherwise")
        if type(v) is int:
            if twin[v] != w:
                raise Refused("a smaller size is computed from other values")
            forms.append(made.forms[v])
        else:
            forms.append(())
            _number(made, step, k, v, w)
    pairs = list(zip(step.outputs, other.outputs, strict=True))
    shapes = [(tuple(upper.avals[v].shape), tuple(lower.avals[w].shape)) for v, w in pairs]
    if [upper.avals[v].dtype for v, _ in pairs] != [lower.avals[w].dtype for _, w in pairs]:
        raise Refused("a dtype depends on the size")
    dtypes = [upper.avals[v].dtype if type(v) is int else v.aval.dtype for v in step.inputs]
    if step.eqn.effects:
        raise Refused(f"{name} does more than compute")
    call = Call(name, forms, step.eqn.params, other.eqn.params, shapes, dtypes)
    found = _conditional(made, step, call) if name == "cond" else answer(call)
    made.answers[id(step)] = found
    for (v, w), form, shape in zip(pairs, found.forms, shapes, strict=True):
        new(shape)
        if len(form) != len(shape[0]) or [sizes(axis) for axis in form] != list(zip(*shape, strict=True)):
            raise Refused(f"{name} makes something of another shape")
        made.forms[v], twin[v] = form, w


def _conditional(made: Padded, step: Step, call: Call) -> Answer:
    """Each branch by itself: what they return has to be valid alike."""
    ways = []
    if id(step) not in made.flat:
        made.flat[id(step)] = [flatten(closed) for closed in call.high["branches"]]
    flats = made.flat[id(step)]
    for upper, closed in zip(flats, call.low["branches"], strict=True):
        about = made.bucket, len(call.shapes), made.flat, call.operands[1:]
        ways.append(_of_two(upper, flatten(closed), *about))
    made.branches[id(step)] = ways
    return Answer([joined(parts) for parts in zip(*(w.outputs for w in ways), strict=True)])


def _number(made: Padded, step: Step, k: int, v: Literal, w: Literal) -> None:
    """Note what a number is, as a function of the size, if it depends on it."""
    if v.aval.dtype != w.aval.dtype or v.aval.shape != w.aval.shape:
        raise Refused("a number depends on the size")
    if _is_same(v.val, w.val):
        return
    if v.aval.shape or not np.isrealobj(v.val):
        raise Refused("a constant depends on the size")
    found = formula_of([v.val, w.val], v.aval.dtype, lambda whole: made.bucket.linear(*whole))
    if found is None:
        raise Refused("a number is not linear in the size, nor a fraction of one that is")
    formula, (slope, rest) = found
    made.numbers[id(step), k] = (formula, slope, rest)


def formula_of(
    values: Sequence[Any], dtype: Any, line: Callable[[list[Any]], T]
) -> tuple[Callable[[Any], Any], T] | None:
    """What a lowering has computed of a size, where a number is one of `values` at several: the formula, and what
    `line` says of the whole numbers that it is of. `line` raises where they are no such numbers.

    None if it is nothing that is known.
    """
    kind, given = dtype.type, [float(v) for v in values]
    if not all(map(math.isfinite, given)):
        return None
    for how, guess in _GUESSES.items():
        try:
            whole = [guess(v) for v in given]
            with np.errstate(all="ignore"):  # a guess may be zero
                found = [kind(_FORMULAS[how](np.float64(n))) for n in whole]
            if found == [kind(v) for v in given]:
                return _FORMULAS[how], line(whole)
        except (Refused, ZeroDivisionError):
            continue
    return None


# What a lowering computes of a size, from a whole number that is linear in it, and that number again.
_FORMULAS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda n: n,
    "inverse": lambda n: 1 / n.astype("float64"),
    "unbiased": lambda n: n.astype("float64") / (n - 1),
}
_GUESSES: dict[str, Callable[[float], float]] = {
    "itself": lambda v: v,
    "inverse": lambda v: round(1 / v),
    "unbiased": lambda v: round(v / (v - 1)),
}


def _is_same(a: Any, b: Any) -> bool:
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
