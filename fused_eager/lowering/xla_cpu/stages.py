"""Stages: a long chain of elementwise steps is several loops over a block, not one.

XLA:CPU makes one loop of it, in which each number goes through all steps. A core computes numbers beside each other as
far as it can see ahead, some 300 instructions, which is a dozen of exponentials and not two chains of eight: then it
waits for each step (eight exponentials of a million floats: 10.3 ms in one loop, 0.46 for one of them). So what has
been waited for long enough is stored, and the next loop begins there. A block of rows stays in the cache, so that this
costs little: 2.9 ms.

A loop ends where a value is written into memory that is longer than the value, at a place that XLA does not know to be
its beginning; else it would see through that. Memory is taken again where whatever read it is known to be computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fused_eager.fusion_rules.elementwise import OPAQUE
from fused_eager.fusion_rules.rowwise import ELEMENTWISE, Rows
from fused_eager.fusion_rules.xla_cpu.latencies import CALLED, CHEAP, FREE, latency

from ..straight_line import Program, Step

AT_ONCE = 120  # cycles that a core waits in a loop without losing time, as it is computing other numbers meanwhile
REST = 40  # cycles that are worth a loop of their own
CALL = 60  # cycles of vectorised work for which a function that XLA calls for each number gets a loop of its own
AGAIN = 4 * CHEAP  # cycles of what had better be computed once more in another loop than stored for it
# XLA:CPU vectorises no loop over a part of an array of halves.
STORED = frozenset({"float32", "float64", "complex64", "complex128", "int32", "int64", "uint32"})
_ONWARD = ELEMENTWISE | FREE
_OUTSIDE = -1  # in place of a value that is stored: what reads goes out of the loop, or ends it in another way


def stored(program: Program, steps: Sequence[Step], taken: Collection[int]) -> set[int]:
    """The values that end a loop; none where long ones would have to be computed several times. `taken` are those that
    go out of the loop over blocks.

    It is those from which something is computed that would be waited for too long in the same loop, and long ones that
    more than one loop needs, which XLA would compute in each.
    """
    found: set[int] = set()
    if not _is_vectorised(steps):
        return found
    waited = _waited(program, steps, found, ends=True)
    if not found:
        return found
    _readers(steps, found, taken, {v for v, cycles in waited.items() if cycles > AGAIN and _can_be(program, v)})
    waited, readers = _waited(program, steps, found), _readers(steps, found, taken)
    again = {v for v, cycles in waited.items() if cycles > AGAIN and len(readers[v]) > 1}
    return found if again <= found else set()


def _is_vectorised(steps: Sequence[Step]) -> bool:
    """Whether most of the work is; else calls of functions, one after the other, overlap a little as they are."""
    eqns = [step.eqn for step in steps if _goes_on(step)]
    called = sum(eqn.primitive.name in CALLED for eqn in eqns)
    return sum(latency(eqn) for eqn in eqns if eqn.primitive.name not in CALLED) >= CALL * called


def _can_be(program: Program, v: int) -> bool:
    return str(program.avals[v].dtype) in STORED


def _waited(program: Program, steps: Sequence[Step], found: set[int], ends: bool = False) -> dict[int, int]:
    """For how many cycles each value is waited for in its loop, where those `found` are stored; what nothing is said of
    is read. `ends`: add to them what has to end a loop."""
    largest = max((program.avals[v].size for step in steps for v in step.outputs), default=0)
    waited: dict[int, int] = {}
    ahead = _ahead(steps) if ends else {}
    for step in steps:
        if not _goes_on(step):
            continue  # what it computes is written anyway
        own = latency(step.eqn)
        if ends and own + max(ahead.get(v, 0) for v in step.outputs) >= REST:
            found.update(v for v in step.values if 0 < waited.get(v, 0) > AT_ONCE - own and _can_be(program, v))
        before = max((waited.get(v, 0) for v in step.values if v not in found), default=0)
        waited.update((v, before + own) for v in step.outputs if program.avals[v].size == largest)
    return waited


def _ahead(steps: Sequence[Step]) -> dict[int, int]:
    """For how many cycles what is computed from each value is waited for, up to where it is written anyway."""
    ahead: dict[int, int] = {}
    for step in reversed(steps):
        if _goes_on(step):
            after = latency(step.eqn) + max(ahead.get(v, 0) for v in step.outputs)
            ahead.update((v, max(after, ahead.get(v, 0))) for v in step.values)
    return ahead


def _goes_on(step: Step) -> bool:
    """Whether what a step computes may be read by others in the loop that computes it."""
    return step.eqn.primitive is not OPAQUE and step.eqn.primitive.name in _ONWARD


def _readers(
    steps: Sequence[Step], found: set[int], taken: Collection[int], long: Collection[int] = ()
) -> dict[int, set[int]]:
    """For each value the loops that compute something from it, each by the value that it stores. Of the `long` ones
    those are added to what is `found` that more than one needs."""
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for v in taken:
        readers[v].add(_OUTSIDE)
    for step in reversed(steps):
        ends: set[int] = set()
        for v in step.outputs:
            if v in long and len(readers[v]) > 1:
                found.add(v)
            ends |= {v} if v in found else readers[v] if _goes_on(step) else {_OUTSIDE}
        for v in step.values:
            readers[v] |= ends
    return readers


@dataclass
class Stages:
    """Which values are stored, and in which memory each: `slots` are the shapes of a row and the dtypes that it is for,
    so many `rows` at a time."""

    rows: int = 0
    of: dict[int, int] = field(default_factory=dict)
    slots: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.of)

    def memory(self) -> tuple[jax.Array, ...]:
        """All of it, to be carried from block to block."""
        return tuple(jnp.zeros((self.rows + 1, *row), dtype) for row, dtype in self.slots)

    def store(self, memory: list[jax.Array], v: int, value: jax.Array, beginning: jax.Array) -> jax.Array:
        """The value, read from the memory into which it has been written; `beginning` is 0."""
        k = self.of[v]
        part = value.reshape(self.rows, *self.slots[k][0])  # flat, it would be computed number by number
        memory[k] = lax.dynamic_update_slice_in_dim(memory[k], part, beginning, 0)
        return memory[k][: self.rows].reshape(value.shape)


def planned(program: Program, steps: Sequence[Step], taken: Collection[int], rows: Rows) -> Stages:
    """The stages of these steps, over blocks of `rows`; `taken` are the values that go out of the loop."""
    found = Stages(rows.block)
    kept = stored(program, steps, taken)
    readers = _readers(steps, kept, taken)
    behind: dict[int, frozenset[int]] = {}  # the stored values that each is computed from
    last: list[int] = []  # in each slot
    for step in steps:
        before = frozenset().union(*(behind.get(v, frozenset()) | ({v} & kept) for v in step.values))
        behind.update((v, before) for v in step.outputs)
        for v in kept.intersection(step.outputs):
            shape = program.avals[v].shape
            slot = shape[rows.axes(shape) :], program.avals[v].dtype
            free = (k for k, old in enumerate(last) if found.slots[k] == slot and readers[old] <= before)
            k = next(free, len(last))
            if k == len(last):
                last.append(v)
                found.slots.append(slot)
            last[k], found.of[v] = v, k
    return found
