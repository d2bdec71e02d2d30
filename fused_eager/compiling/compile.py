"""Compiling: a region's function through JAX to an XLA executable, once per key."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr

from fused_eager.fusion_rules import precision
from fused_eager.fusion_rules.rule import OpClass, rule_for
from fused_eager.fusion_rules.spec import JAX_DTYPE

from .. import xla
from ..bounded import Bounded
from ..log.events import LOG
from ..log.site import describe
from ..lowering import row_blocks
from ..lowering.lower import Function
from ..memory.borrow import Home
from ..memory.scratch import wanted
from ..planning.plan import Region
from ..progress import waiting
from ..tracing.stream import Node
from . import background, telling
from .apart import COMPILER, Abandoned, Unavailable
from .executable import Executable, Made, NotPortable, Portable, RunCheck, direct, made_apart, settle
from .key import identity

if TYPE_CHECKING:
    from .caching import Keeper

MEMORY: Bounded[Hashable, Executable] = Bounded(4096)
_LOCK = threading.Lock()
_FLIGHTS: dict[Hashable, threading.Lock] = {}  # what some thread is loading or compiling now


def region_name(nodes: Sequence[Node], region: Region) -> str:
    """A short name for people: the number of ops, the first and the last line they came from."""
    first, last = (describe(nodes[i].place) for i in (min(region.nodes), max(region.nodes)))
    where = f"{first}" if first == last else f"{first} to {last}"
    return f"{len(region.nodes)} ops from {where}"


def load_or_compile(
    nodes: Sequence[Node],
    region: Region,
    homes: Mapping[int, Home],
    bounds: bool,
    progress: bool,
    keeper: Keeper | None = None,
    apart: bool = True,
) -> Executable:
    """The executable of an XLA region: from memory, from the cache that `keeper` keeps, or newly compiled, `apart` from
    this process or in it.

    Raises:
        NodeFailed: one of its nodes has no lowering after all; plan again with that node as an island.
    """
    key = identity(nodes, region, homes, (bounds, precision.switches()))
    found = MEMORY.get(key)
    if found is not None:
        return found
    with _LOCK:
        flight = _FLIGHTS.setdefault(key, threading.Lock())
    with flight:
        try:
            found = MEMORY.get(key)
            if found is None:
                found = MEMORY[key] = _load_or_compile(nodes, region, homes, bounds, progress, keeper, apart)
        finally:
            _FLIGHTS.pop(key, None)
    return found


def _load_or_compile(
    nodes: Sequence[Node],
    region: Region,
    homes: Mapping[int, Home],
    bounds: bool,
    progress: bool,
    keeper: Keeper | None,
    apart: bool,
) -> Executable:
    name = region_name(nodes, region)

    def make() -> Made:
        # One at a time: XLA takes all cores by itself.
        with _LOCK, waiting(f"compiling {name}", progress):
            telling.compiling(name)
            made = build(nodes, region, homes, bounds, name, apart)
        telling.compiled(nodes, region, homes, bounds, made)
        return made

    if keeper is None:
        return make().executable
    return keeper.load_or_make(nodes, region, homes, bounds, name, progress, make)


def trace(nodes: Sequence[Node], region: Region, homes: Mapping[int, Home], bounds: bool) -> ClosedJaxpr:
    """A region's function, traced.

    Raises:
        NodeFailed: one of its nodes has no lowering.
    """
    with _tracing():
        return jax.make_jaxpr(Function(nodes, region, bounds))(*_arguments(nodes, region, homes))


def _arguments(nodes: Sequence[Node], region: Region, homes: Mapping[int, Home]) -> list[jax.ShapeDtypeStruct]:
    floats = sum(type(s) is float for i in region.nodes for s in nodes[i].scalars)
    ints = sum(type(s) is int for i in region.nodes for s in nodes[i].scalars)
    avals = [jax.ShapeDtypeStruct(homes[v][1], JAX_DTYPE[homes[v][0]]) for v in region.inputs]
    return [*avals, jax.ShapeDtypeStruct((floats,), "float64"), jax.ShapeDtypeStruct((ints,), "int64")]


def build(
    nodes: Sequence[Node], region: Region, homes: Mapping[int, Home], bounds: bool, name: str, apart: bool = True
) -> Made:
    """Trace, lower and compile a region; `apart`: in a process of XLA's own, where that can be.

    Raises:
        NodeFailed: one of its nodes has no lowering.
    """
    if apart:
        with suppress(Unavailable):
            COMPILER.start(background.nice())  # it starts while JAX traces
    function = Function(nodes, region, bounds)
    started = time.perf_counter()
    with _tracing():
        scratch = wanted(region, homes)
        avals = _arguments(nodes, region, homes)
        avals += [jax.ShapeDtypeStruct(shape, JAX_DTYPE[dtype]) for dtype, shape in scratch]
        donated = (*region.donated, *range(len(avals) - len(scratch), len(avals)))
        traced, blocks = function, ""
        if row_blocks.may_gain(avals, _is_pointwise(nodes, region)):
            traced, blocks = row_blocks.in_blocks(jax.make_jaxpr(function)(*avals), donated)
        jitted = jax.jit(traced, donate_argnums=donated, keep_unused=True).trace(*avals)
        lowered = jitted.lower()
        xla.let_go(jitted)
        tracing = time.perf_counter() - started
        loaded, portable, beside = _compiled(lowered, apart)
    seconds = time.perf_counter() - started
    position = {i: p for p, i in enumerate(region.nodes)}
    checks = tuple(RunCheck(position[i], c.error, c.message) for i, c in function.checks)
    outputs = [homes[v] for v in region.outputs]
    call = direct(loaded, outputs, len(checks), scratch)
    return Made(Executable(call, checks, seconds, name), lowered, portable, tracing, blocks, beside)


def _compiled(lowered: jax.stages.Lowered, apart: bool) -> tuple[Any, Portable | NotPortable, bool]:
    """The executable, its bytes, and whether it was compiled apart."""
    if background.is_closing():
        raise Abandoned
    if apart:
        try:
            return *made_apart(lowered, background.nice()), True
        except Unavailable as why:
            if str(why):
                LOG.count(f"regions compiled in this process: {why}")
    return *settle(lowered, xla.compiled(lowered)), False


_IN_ONE_LOOP = (OpClass.POINTWISE, OpClass.FACTORY, OpClass.REDUCTION)


def _is_pointwise(nodes: Sequence[Node], region: Region) -> bool:
    rules = [rule_for(nodes[i].twin) for i in region.nodes]
    return all(rule is not None and rule.cls in _IN_ONE_LOOP for rule in rules)


@contextmanager
def _tracing() -> Iterator[None]:
    """No line of this library in the machine code: tracing is a third faster, and no path of this machine is kept.
    x64 is switched on for this trace alone: the user's own JAX code keeps its setting."""
    option = getattr(jax._src.config, "traceback_in_locations_limit", None)
    with xla.enable_x64(True), jax.default_device(xla.device()), nullcontext() if option is None else option(0):
        yield


__all__ = ["MEMORY", "Executable", "RunCheck", "build", "load_or_compile", "region_name", "trace"]
