"""Straight lines: a traced function as the primitives that it applies, in order, without the calls between them.

JAX traces a function of its own library as a call, and what one op writes to its home and the next reads from it as two
changes of shape. Neither is left here, so that what becomes of a value can be followed from its first axis to its last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

# Primitives that are calls, and which of their parameters is the function.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr",
         "custom_vjp_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One primitive applied to values, by number."""

    eqn: Any
    inputs: tuple[Any, ...]  # numbers of values, or literals
    outputs: tuple[int, ...]
    shape: tuple[int, ...]  # of the outputs

    @property
    def values(self) -> list[int]:
        """The inputs that are values."""
        return [v for v in self.inputs if type(v) is int]


@dataclass
class Program:
    """A traced function without calls: its steps in order; values are numbers."""

    steps: list[Step] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    shaped: dict[int, Any] = field(default_factory=dict)  # values that are another one, of another shape

    def add(self, aval: Any) -> int:
        """A new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def apply(self, eqn: Any, inputs: Sequence[Any]) -> list[int]:
        """The new values that a primitive computes."""
        if eqn.primitive.name == "optimization_barrier" and len(inputs) > 1:
            # What it holds together here need not be together: one for each, some by rows.
            pairs = zip(inputs, eqn.outvars, strict=True)
            return [value for v, out in pairs for value in self._step(eqn, [v], [out])]
        return self._step(eqn, inputs, eqn.outvars)

    def _step(self, eqn: Any, inputs: Sequence[Any], outvars: Sequence[Any]) -> list[int]:
        outputs = [self.add(v.aval) for v in outvars]
        self.steps.append(Step(eqn, tuple(inputs), tuple(outputs), tuple(outvars[0].aval.shape) if outvars else ()))
        return outputs


class Numbering:
    """Numbers for what values are: two of one number, of whatever program, are computed alike from the same inputs.

    That is global value numbering (Alpern, Wegman and Zadeck, 1988). What only tells XLA how to go about it, a barrier
    or a change of dtype that is taken back, is none.
    """

    def __init__(self) -> None:
        self._known: defaultdict[Hashable, list[tuple[Any, int]]] = defaultdict(list)
        self._count = 0
        self._cast: dict[int, tuple[int, Any]] = {}  # what was reinterpreted as this, and its dtype

    def of(self, program: Program, params: Mapping[int, Any]) -> list[int]:
        """The numbers of a program's results. `params` are by a step's identity, where they are others than its own."""
        numbers = {v: self._number("input", i) for i, v in enumerate(program.inputs)}
        numbers.update({v: self._constant(value) for v, value in program.constants.items()})

        def number(v: Any) -> int:
            return numbers[v] if type(v) is int else self._constant(v.val)

        for step in program.steps:
            name, given = step.eqn.primitive.name, [number(v) for v in step.inputs]
            if name == "optimization_barrier":
                numbers.update(zip(step.outputs, given, strict=True))
                continue
            found = self._number((name, *given), params.get(id(step), step.eqn.params))
            for k, v in enumerate(step.outputs):
                numbers[v] = self._number(("part", found, k), None)
            if name == "bitcast_convert_type" and step.values:
                self._take_back(program, step, numbers, given[0])
        return [number(v) for v in program.outputs]

    def _take_back(self, program: Program, step: Step, numbers: dict[int, int], given: int) -> None:
        before = self._cast.get(given)
        if before is not None and before[1] == program.avals[step.outputs[0]].dtype:
            numbers[step.outputs[0]] = before[0]
        else:
            self._cast[numbers[step.outputs[0]]] = given, program.avals[step.values[0]].dtype

    def _constant(self, value: Any) -> int:
        array = np.asarray(value)
        return self._number(("constant", str(array.dtype), array.shape, array.tobytes()), None)

    def _number(self, what: Hashable, params: Any) -> int:
        for known, number in self._known[what]:
            if known == params:
                return number
        self._count += 1
        self._known[what].append((params, self._count))
        return self._count


def flatten(closed: ClosedJaxpr) -> Program:
    """The steps of a traced function, those of the functions it calls in their places, those nobody needs left out."""
    program = Program()
    program.inputs = [program.add(v.aval) for v in closed.jaxpr.invars]
    program.outputs = _inline(program, closed.jaxpr, closed.consts, program.inputs)
    needed = {v for v in program.outputs if type(v) is int}
    kept = []
    for step in reversed(program.steps):
        if needed & set(step.outputs) or step.eqn.effects:
            needed.update(step.values)
            kept.append(step)
    program.steps = kept[::-1]
    return program


def without_repeats(program: Program) -> Program:
    """The same program, in which nothing is computed twice from the same values. XLA would see that, too, and fuse what
    is left in another way than it was expected to."""
    same: dict[int, int] = {}
    known: defaultdict[Hashable, list[Step]] = defaultdict(list)

    def first(v: Any) -> Any:
        return same.get(v, v) if type(v) is int else v

    def named(v: Any) -> Hashable:
        return v if type(v) is int else (str(v.aval), np.asarray(v.val).tobytes())

    steps = []
    for step in program.steps:
        inputs = tuple(map(first, step.inputs))
        alike = known[step.eqn.primitive.name, step.shape, tuple(map(named, inputs))]
        found = next((k for k in alike if k.eqn.params == step.eqn.params), None)
        if found is None or step.eqn.effects:
            steps.append(replace(step, inputs=inputs))
            alike.append(steps[-1])
        else:
            same.update(zip(step.outputs, found.outputs, strict=True))
    return replace(program, steps=steps, outputs=[first(v) for v in program.outputs])


def _of_platform(eqn: Any) -> ClosedJaxpr:
    named = enumerate(eqn.params["branches_platforms"])
    return eqn.params["branches"][next(i for i, names in named if names is None or "cpu" in names)]


def _only_reshapes(eqn: Any) -> bool:
    return eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None and len(eqn.invars) == 1


def _inline(program: Program, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    names: dict[Var, Any] = dict(zip(jaxpr.invars, inputs, strict=True))  # of values; one may have several
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        names[var] = program.add(var.aval)
        program.constants[names[var]] = value

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names[atom]

    for eqn in jaxpr.eqns:
        given = [named(a) for a in eqn.invars]
        reshapes = _only_reshapes(eqn) and type(given[0]) is int
        if reshapes:
            # From what it was before it was flat: what one op writes, and the next reads, keeps its rows.
            given = [program.shaped.get(given[0], given[0])]
            if program.avals[given[0]].shape == eqn.outvars[0].aval.shape:
                names[eqn.outvars[0]] = given[0]
                continue
        if eqn.params.get("branches_platforms"):  # a cond over the platform that it is compiled for
            inner, given = _of_platform(eqn), given[1:]
        else:
            inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
        if inner is None:
            outputs: Sequence[Any] = program.apply(eqn, given)
            if reshapes:
                program.shaped[outputs[0]] = given[0]
        else:
            closed = inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())
            outputs = _inline(program, closed.jaxpr, closed.consts, given)
        names.update(zip(eqn.outvars, outputs, strict=True))
    return [named(a) for a in jaxpr.outvars]
