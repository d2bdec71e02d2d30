"""Compiling: a region's function through JAX to an XLA executable, once per key."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping, Sequence

import jax

from fused_eager.fusion_rules.spec import JAX_DTYPE

from . import telling
from .bounded import Bounded
from .buffers import Home
from .executable import Executable, RunCheck, device, direct
from .key import identity
from .lower import Function
from .plan import Region
from .progress import waiting
from .site import describe
from .stream import Node

MEMORY: Bounded[Hashable, Executable] = Bounded(4096)
_LOCK = threading.Lock()


def region_name(nodes: Sequence[Node], region: Region) -> str:
    """A short name for people: the number of ops, the first and the last line they came from."""
    first, last = (describe(nodes[i].place) for i in (region.nodes[0], region.nodes[-1]))
    where = f"{first}" if first == last else f"{first} to {last}"
    return f"{len(region.nodes)} ops from {where}"


def load_or_compile(
    nodes: Sequence[Node], region: Region, homes: Mapping[int, Home], bounds: bool, progress: bool
) -> Executable:
    """The executable of an XLA region, from memory or newly compiled.

    Raises:
        NodeFailed: one of its nodes has no lowering after all; plan again with that node as an island.
    """
    key = identity(nodes, region, homes, bounds)
    found = MEMORY.get(key)
    if found is not None:
        return found
    with _LOCK:
        found = MEMORY.get(key)
        if found is None:
            found = MEMORY[key] = _compile(nodes, region, homes, bounds, progress)
    return found


def _compile(
    nodes: Sequence[Node], region: Region, homes: Mapping[int, Home], bounds: bool, progress: bool
) -> Executable:
    name = region_name(nodes, region)
    function = Function(nodes, region, bounds)
    floats = sum(type(s) is float for i in region.nodes for s in nodes[i].scalars)
    ints = sum(type(s) is int for i in region.nodes for s in nodes[i].scalars)
    telling.compiling(name)
    started = time.perf_counter()
    # x64 is switched on for this trace alone: the user's own JAX code keeps its setting.
    with jax.enable_x64(True), jax.default_device(device()), waiting(f"compiling {name}", progress):
        avals = [jax.ShapeDtypeStruct(homes[v][1], JAX_DTYPE[homes[v][0]]) for v in region.inputs]
        avals.append(jax.ShapeDtypeStruct((floats,), "float64"))
        avals.append(jax.ShapeDtypeStruct((ints,), "int64"))
        jitted = jax.jit(function, donate_argnums=region.donated, keep_unused=True)
        lowered = jitted.lower(*avals)
        traced = time.perf_counter() - started
        compiled = lowered.compile()
    seconds = time.perf_counter() - started
    position = {i: p for p, i in enumerate(region.nodes)}
    checks = tuple(RunCheck(position[i], c.error, c.message) for i, c in function.checks)
    telling.compiled(nodes, region, homes, bounds, name, seconds, traced)
    outputs = [homes[v] for v in region.outputs]
    return Executable(direct(compiled.runtime_executable(), outputs, len(checks)), checks, seconds, name)


__all__ = ["MEMORY", "Executable", "RunCheck", "load_or_compile", "region_name"]
