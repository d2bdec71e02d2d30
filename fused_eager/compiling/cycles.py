"""Cycles: what XLA's compiler for a TPU expects of each kernel that it has made, read from the compiled program's text.

It writes into the text how many cycles a kernel (a loop, a product, a copy) takes, after layouts, passes through the
matrix unit and windows are chosen: what its cost analysis knows nothing of. Gathers, scatters, sorts, windows that are
reduced, and custom kernels have none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([\w-]+)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BODY = re.compile(r"body=%?([\w.-]+)")
_CALLED = re.compile(r"(?:to_apply|calls|called_computations)=\{?%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Of these a program takes time for, and the compiler has no count.
_HEAVY = frozenset({"reduce-window", "select-and-scatter", "scatter", "gather", "sort", "rng-bit-generator"})
_KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True, slots=True)
class Cycles:
    """The cycles of a program's kernels, one after the other, and how many kernels there is no count of."""

    counted: float = 0.0
    uncounted: int = 0

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(self.counted + other.counted, self.uncounted + other.uncounted)

    def __mul__(self, times: int) -> Cycles:
        return Cycles(self.counted * times, self.uncounted * times)


def cycles(text: str) -> Cycles:
    """The cycles of a compiled program, from its text (`Compiled.as_text()`). A loop counts as often as it goes round;
    one that does not say is a kernel without a count. Of branches the longest counts."""
    entry, bodies = "", {}
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" "):
            if found := _COMPUTATION.match(line):
                bodies[found[2]] = lines = []
                entry = found[2] if found[1] else entry
        else:
            lines.append(line)
    return _of(entry, bodies) if entry else Cycles()


def _of(name: str, bodies: Mapping[str, list[str]]) -> Cycles:
    total = Cycles()
    for line in bodies.get(name, ()):
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        op = found[1]
        if count := _CYCLES.search(line):
            total += Cycles(float(count[1]))
        elif op in _HEAVY or (op == "custom-call" and _KERNEL in line):
            total += Cycles(0.0, 1)
        elif op == "while":
            body, trips = _BODY.search(line), _TRIPS.search(line)
            once = _of(body[1], bodies) if body else Cycles()
            total += once * int(trips[1]) if trips else once + Cycles(0.0, 1)
        elif op == "conditional" and (branches := _BRANCHES.search(line)):
            names = re.findall(r"[\w.-]+", " ".join(filter(None, branches.groups())))
            total += max((_of(branch, bodies) for branch in names), key=lambda c: c.counted)
        elif op == "call" and (called := _CALLED.search(line)):
            total += _of(called[1], bodies)
    return total
