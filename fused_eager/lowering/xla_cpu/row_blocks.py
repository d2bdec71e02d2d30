"""Row blocks: a region that goes over large rows several times does so block by block, in the cache.

A normalization reads its rows once for each statistic and once to apply them, and XLA:CPU makes a loop over all rows
of each: three passes over memory where one would do. Where rows do not depend on each other, the region is computed for
as many of them at a time as a cache holds: one pass (layer norm, gelu and a residual at [32, 512, 1024] on a Xeon:
20 ms instead of 38). The idea is that of tiling in every blocked linear algebra library; what is new is only to find
it in a traced function.

That is for one thread: with more of them XLA shares out each loop over all rows, and memory feeds several at once.

Each equation of the function comes *before* the loop (it depends on no rows), is *in* it (`fusion_rules.rowwise` knows
how it is computed for a block), or comes *after* it (it mixes rows, or depends on such). A sum, maximum or minimum over
all rows is taken of each block, and of those afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from fused_eager.fusion_rules.cores import threads
from fused_eager.fusion_rules.elementwise import OPAQUE
from fused_eager.fusion_rules.rowwise import (
    ELEMENTWISE,
    MAKERS,
    REDUCTIONS,
    Params,
    Rows,
    params_of_block,
    row_axes,
)
from fused_eager.fusion_rules.xla_cpu.steps import largest_divisor

from ..straight_line import Program, Step, flatten, without_repeats
from .stages import Stages, planned

LARGE = 8 << 20  # bytes of the largest value: below, a second pass finds it in a cache
STAGED = 256 << 10  # and of those for which a chain of elementwise steps is worth several loops
BLOCK = 256 << 10  # bytes of its part in a block: all values of a block are to stay in the cache of a core
SMALLEST, FEWEST = 64 << 10, 4  # bytes of a block, and blocks, for which the loop is worth its turns

# ---- which steps are in the loop ---------------------------------------------------------------------------------


@dataclass
class Cut:
    """The steps of a program around a loop over blocks of rows."""

    rows: Rows
    before: list[Step] = field(default_factory=list)
    inside: list[tuple[Step, Params]] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)
    by_rows: set[int] = field(default_factory=set)  # values
    partial: list[Step] = field(default_factory=list)  # reductions over all rows
    exported: list[int] = field(default_factory=list)  # values by rows that are needed whole
    spread: set[int] = field(default_factory=set)  # what rows were reduced to and larger values are computed from
    stages: Stages = field(default_factory=Stages)


def cut(program: Program, rows: Rows) -> Cut:
    """Sort the steps of a program for these rows."""
    found = Cut(rows)
    late: set[int] = set()
    whole: set[int] = set()  # what need not be taken out of the loop

    def there(values: Sequence[int]) -> None:
        whole.update(values)
        found.by_rows.update(v for v in values if rows.axes(program.avals[v].shape))

    there(program.inputs)

    def export(values: Sequence[int]) -> None:
        for v in values:
            if v in found.by_rows and v not in whole and v not in found.exported:
                found.exported.append(v)

    for step in program.steps:
        is_late = any(v in late for v in step.values)
        by_rows = [program.avals[v].shape for v in step.values if v in found.by_rows]
        params = None
        if not is_late and (by_rows or step.eqn.primitive.name in MAKERS) and not step.eqn.effects:
            params = params_of_block(rows, step.eqn, step.shape, by_rows)
        if params is not None:
            found.inside.append((step, params))
            found.by_rows.update(step.outputs)
        elif by_rows and not is_late and _is_of_all_rows(rows, step, by_rows[0]):
            found.partial.append(step)
            late.update(step.outputs)
        elif by_rows or is_late:
            export(step.values)
            found.after.append(step)
            late.update(step.outputs)
        else:
            found.before.append(step)
            there(step.outputs)
    export([v for v in program.outputs if type(v) is int])
    found.spread = spread(program, found)
    return found


def _is_of_all_rows(rows: Rows, step: Step, shape: tuple[int, ...]) -> bool:
    return step.eqn.primitive.name in REDUCTIONS and set(range(rows.axes(shape))) <= set(step.eqn.params["axes"])


def gains(program: Program, found: Cut) -> bool:
    """Whether rows would else be gone over again, because what one was reduced to is spread over it, or over others, or
    because a function of each number takes several passes, or a chain of them several stages.

    And nothing that was one loop with what comes after becomes two, nor is much more written than the results.
    """
    opaque = any(step.eqn.primitive is OPAQUE for step, _ in found.inside)
    largest = max(map(_nbytes, program.avals))
    passes = bool(found.stages) or (largest >= LARGE and (bool(found.spread) or opaque))
    written = sum(found.rows.turns * _nbytes(program.avals[v]) for s in found.partial for v in s.outputs)
    small = written <= largest
    return passes and small and not _is_torn(found) and not _has_halves(program, found)


def _has_halves(program: Program, found: Cut) -> bool:
    """Whether halves go into the loop or out of it: XLA:CPU vectorises no loop over a part of an array of such."""
    made = {v for step, _ in found.inside for v in step.outputs}
    read = {v for step, _ in found.inside for v in step.values if v in found.by_rows}
    dtypes = [program.avals[v].dtype for v in (*found.exported, *(read - made))]
    return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)


def spread(program: Program, found: Cut) -> set[int]:
    """What rows were reduced to, or what was computed from that alone, where larger values are computed from it."""
    sizes = [math.prod(a.shape) for a in program.avals]
    reduced, out = set[int](), set[int]()
    for step, _ in found.inside:
        inputs = [v for v in step.values if v in found.by_rows]
        largest = max(sizes[v] for v in step.outputs)
        out.update(v for v in inputs if v in reduced and sizes[v] < largest)
        if any(sizes[v] > largest or (v in reduced and sizes[v] == largest) for v in inputs):
            reduced.update(step.outputs)
    return out


def _is_torn(found: Cut) -> bool:
    """Whether a step after the loop could be one loop with what it takes out of it."""
    taken = set(found.exported)
    for step in found.after:
        if taken.intersection(step.values):
            if step.eqn.primitive.name == "reshape":
                taken.update(step.outputs)  # no loop at all
            elif step.eqn.primitive.name in ELEMENTWISE | REDUCTIONS:
                return True
    return False


def candidates(program: Program) -> Iterator[Rows]:
    """What may count the rows of a program's largest values, the finest first."""
    most = max(map(_nbytes, program.avals), default=0)
    full = min(BLOCK, max(most // FEWEST, SMALLEST))
    largest = {tuple(a.shape): a for a in program.avals if _nbytes(a) == most >= STAGED}
    several = ((s, n) for s in largest if s for n in range(1, max(len(s), 2)))
    for shape, axes in sorted(several, key=lambda c: (-c[1], c[0])):
        sizes, n = shape[:axes], shape[axes - 1]
        row = most // math.prod(sizes)
        block = largest_divisor(n, full // row)
        rows = Rows(sizes, block)
        if (block == n or block * row >= SMALLEST) and row <= 2 * BLOCK and rows.turns >= FEWEST:
            yield rows


def may_gain(arguments: Sequence[jax.ShapeDtypeStruct], is_pointwise: bool) -> bool:
    """Whether a function of these arguments is worth a look; one that is pointwise may have stages. With more threads
    it is not: XLA:CPU cuts no loop inside of another for them (two threads, the same layer norm: 24 ms as it is, 27 in
    blocks)."""
    least = STAGED if is_pointwise else LARGE
    return threads() == 1 and any(_nbytes(a) >= least for a in arguments)


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


# ---- the function ------------------------------------------------------------------------------------------------


def in_blocks(closed: ClosedJaxpr, spare: Sequence[int]) -> tuple[Any, str]:
    """A traced function as one over blocks of rows, and in words how; the words are empty if that gains nothing.

    `spare` are the arguments, by position, that are donated: each to the next output of its dtype and shape, as JAX
    pairs them.
    """
    program = without_repeats(flatten(closed))
    for rows in candidates(program):
        found = cut(program, rows)
        taken = {*found.exported, *(v for step in found.partial for v in step.values)}
        found.stages = planned(program, [step for step, _ in found.inside], taken, rows)
        if found.inside and gains(program, found):
            return Blocked(program, found, spare), f"{rows.count} rows, {rows.block} at a time"
    return jax.extend.core.jaxpr_as_fun(closed), ""


class Blocked:
    """A program as a function of its inputs."""

    def __init__(self, program: Program, found: Cut, spare: Sequence[int]):
        self.program, self.cut = program, found
        others = {v for step in (*found.before, *found.after) for v in step.values}
        others.update(v for v in program.outputs if type(v) is int)
        # By position and number: nothing reads them but the loop, by rows.
        self.spare = [(i, v) for i in spare if (v := program.inputs[i]) not in others]
        self.heirs = _heirs(program, spare)

    def __call__(self, *arrays: jax.Array) -> list[Any]:
        values: dict[int, Any] = {**self.program.constants, **dict(zip(self.program.inputs, arrays, strict=True))}
        _run(values, self.cut.before)
        self._loop(values, arrays)
        _run(values, self.cut.after)
        return [_value(values, v) for v in self.program.outputs]

    def _loop(self, values: dict[int, Any], arrays: Sequence[jax.Array]) -> None:
        rows, avals = self.cut.rows, self.program.avals
        partial = [v for s in self.cut.partial for v in s.outputs]
        spare = {v: arrays[i] for i, v in self.spare}
        written: dict[int, int] = {}  # inputs whose memory takes a result, and which: a block is read, then written
        wholes = []
        for k, v in enumerate(self.cut.exported):
            found = self._room(v, spare)
            if found is None:
                memory = jnp.zeros(avals[v].shape, avals[v].dtype)
            else:
                memory = spare.pop(found).reshape(avals[v].shape)
                written[found] = k
            wholes.append(_flat(rows, memory))
        wholes += [jnp.zeros((rows.turns, *avals[v].shape), avals[v].dtype) for v in partial]

        def turn(i: jax.Array, carried: tuple[Any, ...]) -> tuple[Any, ...]:
            wholes, memory, beginning = carried
            now = {v: wholes[k].reshape(avals[v].shape) for v, k in written.items()}
            stored = list(memory)
            block = self._block({**values, **now}, i, stored, beginning)
            out = []
            for whole, v in zip(wholes, [*self.cut.exported, *partial], strict=True):
                if v in self.cut.by_rows:
                    part = block[v].reshape(rows.block, *whole.shape[1:])
                    out.append(lax.dynamic_update_slice_in_dim(whole, part, i * rows.block, 0))
                else:
                    out.append(lax.dynamic_update_index_in_dim(whole, block[v], i, 0))
            return tuple(out), tuple(stored), beginning & i  # always 0, which XLA cannot know

        made, *_ = lax.fori_loop(0, rows.turns, turn, (tuple(wholes), self.cut.stages.memory(), jnp.int32(0)))
        values.update((v, m.reshape(avals[v].shape)) for v, m in zip(self.cut.exported, made, strict=False))
        for step, stacked in zip(self.cut.partial, made[len(self.cut.exported) :], strict=True):
            values.update(_results(step, [stacked], {**step.eqn.params, "axes": (0,)}))

    def _room(self, v: int, spare: dict[int, jax.Array]) -> int | None:
        """The input whose memory takes result `v`: the one that was given for it, or one that was given for none."""
        aval = self.program.avals[v]
        for s, array in spare.items():
            heir = self.heirs.get(s)
            if heir == v or (heir is None and (array.size, array.dtype) == (math.prod(aval.shape), aval.dtype)):
                return s
        return None

    def _block(
        self, values: dict[int, Any], i: jax.Array, memory: list[jax.Array], beginning: jax.Array
    ) -> dict[int, Any]:
        """All values by rows, for one block; `memory` is that of the stages."""
        rows, block = self.cut.rows, dict[int, Any]()

        def taken(step: Step, v: Any) -> Any:
            if type(v) is not int:
                return v.val
            if v in self.cut.by_rows:
                if v not in block:
                    whole = _flat(rows, values[v])
                    part = lax.dynamic_slice_in_dim(whole, i * rows.block, rows.block)
                    block[v] = part.reshape(rows.of_block(values[v].shape))
                return block[v]
            at, part = _starts(rows, step.shape, i), rows.of_block(step.shape)
            axes = row_axes(step.eqn, values[v].shape, rows.axes(step.shape))
            if not axes:
                return values[v]
            sizes = [part[axes[a]] if a in axes else n for a, n in enumerate(values[v].shape)]
            return lax.dynamic_slice(values[v], [at[axes[a]] if a in axes else 0 for a in range(len(sizes))], sizes)

        for step, params in [*self.cut.inside, *((s, s.eqn.params) for s in self.cut.partial)]:
            for v, made in _results(step, [taken(step, v) for v in step.inputs], params):
                if v in self.cut.stages.of:
                    made = self.cut.stages.store(memory, v, made, beginning)
                block[v] = _stored(made) if v in self.cut.spread else made
        return block


def _heirs(program: Program, spare: Sequence[int]) -> dict[int, int]:
    """Which result gets the memory of which donated input, by number."""
    waiting: defaultdict[Any, deque[int]] = defaultdict(deque)
    for i in spare:
        aval = program.avals[program.inputs[i]]
        waiting[aval.shape, aval.dtype].append(program.inputs[i])
    found = {}
    for v in program.outputs:
        if type(v) is int and (queue := waiting[program.avals[v].shape, program.avals[v].dtype]):
            found[queue.popleft()] = v
    return found


def _stored(value: jax.Array) -> jax.Array:
    """A value that XLA:CPU stores before it is used. What is cheap to compute it computes again in each loop that uses
    it, there even for each element of a row (a layer norm in blocks: 80 ms instead of 20); a maximum it does not."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    least = jnp.full((*value.shape, 1), -jnp.inf, value.dtype)
    return lax.reduce_max(lax.concatenate([value[..., None], least], value.ndim), (value.ndim,))


def _flat(rows: Rows, whole: jax.Array) -> jax.Array:
    """A value by rows with one axis that counts them."""
    return whole.reshape(rows.count, *whole.shape[rows.axes(whole.shape) :])


def _starts(rows: Rows, shape: tuple[int, ...], i: jax.Array) -> list[Any]:
    """Where block `i` of a value by rows begins along each of its axes."""
    axes, row = rows.axes(shape), i * rows.block
    starts: list[Any] = []
    for n in shape[:axes][::-1]:
        starts.insert(0, row % n)
        row = row // n
    return [*starts, *[0] * (len(shape) - axes)]


def _value(values: dict[int, Any], v: Any) -> Any:
    return values[v] if type(v) is int else v.val


def _run(values: dict[int, Any], steps: Sequence[Step]) -> None:
    for step in steps:
        values.update(_results(step, [_value(values, v) for v in step.inputs], step.eqn.params))


def _results(step: Step, inputs: Sequence[Any], params: Params) -> Iterator[tuple[int, Any]]:
    with step.eqn.ctx.manager:
        made = step.eqn.primitive.bind(*inputs, **params)
    return zip(step.outputs, made if step.eqn.primitive.multiple_results else [made], strict=True)
