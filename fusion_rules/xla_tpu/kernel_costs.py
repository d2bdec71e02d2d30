"""What a Pallas kernel takes, for XLA's compiler, which cannot look into one: its schedule and its forecast go by what
the kernel says of itself, and most say nothing, which counts as no work at all.

Counted is what the grid goes through. Where a kernel skips a step by its values, as below a causal mask, the step is
counted too, but not what it does `seldom`. A block is fetched again whenever its place differs from that of the step
before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

KERNEL = "pallas_call"
_SELDOM = "seldom"
_TRANSCENDENTAL = {"cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "tanh"}


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Floating point operations of products, transcendental functions, bytes to and from the main memory, and steps."""

    flops: int = 0
    transcendentals: int = 0
    bytes: int = 0
    steps: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*[a + times * b for a, b in pairs])


def seldom(function: Callable[[], None]) -> Callable[[], None]:
    """A part of a kernel's body that hardly ever runs, and is not counted."""

    def run() -> None:
        function()

    run.__name__ = _SELDOM
    return jax.jit(run)


def work_of(eqn: Any) -> Work | None:
    """What a kernel takes, as an equation of a traced program; None if its grid is not known before it runs."""
    mapping = eqn.params["grid_mapping"]
    if not all(isinstance(n, int) for n in mapping.grid):
        return None
    steps = math.prod(mapping.grid)
    moved = sum(_bytes(block, mapping.grid) for block in mapping.block_mappings)
    return Work(bytes=moved, steps=steps).plus(_body(eqn.params["jaxpr"]), steps)


def _bytes(block: Any, grid: tuple[int, ...]) -> int:
    """What is fetched, or written, of one operand."""
    array, space = block.array_aval, str(getattr(block.transformed_block_aval, "memory_space", None)).lower()
    if "any" in space or "hbm" in space:  # the kernel fetches what it needs by itself: at most all of it, we take
        return math.prod(array.shape) * array.dtype.itemsize
    inner = _depends(block.index_map_jaxpr.jaxpr, len(grid))
    sides = [n if isinstance(n, int) else getattr(n, "block_size", 1) for n in block.block_shape]
    return math.prod(sides) * array.dtype.itemsize * math.prod(grid[: inner + 1])


def _depends(jaxpr: Jaxpr, sizes: int) -> int:
    """The innermost dimension of the grid that a block's place depends on; -1 if it is always the same."""
    of: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars[:sizes])}
    for eqn in jaxpr.eqns:
        inner = max((_of(of, v) for v in eqn.invars), default=-1)
        of.update(dict.fromkeys(eqn.outvars, inner))
    return max((_of(of, v) for v in jaxpr.outvars), default=-1)


def _of(of: Mapping[Any, int], v: Any) -> int:
    return -1 if hasattr(v, "val") else of.get(v, -1)  # a literal has no place among variables


def _body(jaxpr: Any) -> Work:
    """What one step takes."""
    found = Work()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (over, _), _ = eqn.params["dimension_numbers"]
            side = eqn.invars[0].aval.shape
            found = found.plus(Work(2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(side[i] for i in over)))
        elif name in _TRANSCENDENTAL:
            found = found.plus(Work(0, math.prod(eqn.outvars[0].aval.shape)))
        elif name == "cond":
            found = found.plus(max(map(_body, eqn.params["branches"]), key=lambda w: (w.flops, w.transcendentals)))
        elif eqn.params.get("name") != _SELDOM:
            for inner in _inner(eqn.params):
                found = found.plus(_body(inner), eqn.params.get("length") or 1)
    return found


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        yield from (x for x in (value if isinstance(value, (tuple, list)) else (value,))
                    if isinstance(x, (Jaxpr, ClosedJaxpr)))


def steps(jaxpr: Any) -> int:
    """How many steps the grids of a program's kernels have, as far as these are compiled and known before they run."""
    found = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == KERNEL:
            work = None if eqn.params["interpret"] else work_of(eqn)
            found += work.steps if work else 0
        else:
            found += sum(map(steps, _inner(eqn.params))) * (eqn.params.get("length") or 1)
    return found


def estimated(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, in which each kernel that says nothing of what it takes says this."""
    return closed.replace(jaxpr=_estimated(closed.jaxpr))


def _estimated(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr.replace(eqns=[_equation(eqn) for eqn in jaxpr.eqns])


def _equation(eqn: Any) -> Any:
    if eqn.primitive.name == KERNEL:
        if eqn.params["cost_estimate"] is not None:
            return eqn
        from jax.experimental import pallas

        work = work_of(eqn)
        cost = work and pallas.CostEstimate(work.flops, work.transcendentals, work.bytes)
        return eqn.replace(params={**eqn.params, "cost_estimate": cost})
    if not any(True for _ in _inner(eqn.params)):
        return eqn
    return eqn.replace(params={name: _value(value) for name, value in eqn.params.items()})


def _value(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return estimated(value)
    if isinstance(value, Jaxpr):
        return _estimated(value)
    return type(value)(map(_value, value)) if type(value) in (tuple, list) else value
