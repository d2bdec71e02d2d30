"""Compiling: a region's function through JAX to an XLA executable, once per key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from fused_eager.fusion_rules import collectives, precision
from fused_eager.fusion_rules.deferred import jax
from fused_eager.fusion_rules.padded import Refused
from fused_eager.fusion_rules.platforms import ANY, lowering_for
from fused_eager.fusion_rules.rule import OpClass, rule_for
from fused_eager.fusion_rules.spec import JAX_DTYPE

from .. import xla
from ..bounded import Bounded
from ..devices.device import Device
from ..devices.home import Home
from ..devices.host.device import HOST
from ..errors import ValidationError
from ..log.events import LOG
from ..planning.room import wanted
from ..progress import waiting
from ..quiet import uncompiled
from . import background, emit
from .executable import (
    Abandoned,
    Executable,
    Made,
    NotPortable,
    Portable,
    RunCheck,
    Unavailable,
    direct,
    finalize,
    get_ready,
    loaded_for,
    made_in_subprocess,
    misfit_on,
    needs,
)
from .key import Computation, identity
from .xla_cpu import finishing  # noqa: F401  (the variants of XLA:CPU)

MEMORY: Bounded[Hashable, Executable] = Bounded(4096)
_LOCK = threading.Lock()
_FLIGHTS: dict[Hashable, threading.Lock] = {}  # what some thread is loading or compiling now


class Keeper(Protocol):
    """Where executables are looked for, and kept."""

    def load_or_make(
        self, computation: Computation, bounds: bool, progress: bool, make: Callable[[], Made], device: Device
    ) -> Executable:
        """The one that is kept, or else what `make` compiles."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How computations are compiled: all that is no part of them."""

    bounds: bool = True  # indices are checked
    progress: bool = False  # what takes long is said
    keeper: Keeper | None = None
    in_subprocess: bool = True  # in a process of XLA's own, where that can be
    device: Device = HOST


def _plainly(computation: Computation, settings: Settings, make: Callable[[], Executable]) -> Executable:
    return make()


# What stands around the making of each executable, the last of them: whoever wants to know which regions a program has.
AROUND: list[Callable[[Computation, Settings, Callable[[], Executable]], Executable]] = [_plainly]


@contextmanager
def as_it_is() -> Iterator[None]:
    """In the body, nothing stands around it: what is made is not the program's."""
    AROUND.append(alone := lambda computation, settings, make: make())
    try:
        yield
    finally:
        AROUND.remove(alone)


@uncompiled
def load_or_compile(computation: Computation, settings: Settings) -> Executable:
    """The executable of an XLA region: from memory, from the compile cache, or newly compiled.

    Raises:
        NodeFailed: one of its nodes has no lowering after all; plan again with that node as an island.
    """
    key = identity(computation, (settings.bounds, precision.switches(), settings.device.name))
    found = MEMORY.get(key)
    if found is not None:
        return found
    _others(_LOCK, computation, settings)
    with _LOCK:
        flight = _FLIGHTS.setdefault(key, threading.Lock())
    _others(flight, computation, settings)
    with flight:
        try:
            found = MEMORY.get(key)
            if found is None:
                make = partial(_load_or_compile, computation, settings)
                found = MEMORY[key] = _of_kin(computation, settings) or AROUND[-1](computation, settings, make)
        finally:
            _FLIGHTS.pop(key, None)
    return found


def _others(lock: threading.Lock, computation: Computation, settings: Settings) -> None:
    """Wait for the thread that compiles, and let it be known that this is what is waited for. Whoever takes the lock
    then may wait again, as another thread may be faster."""
    if lock.locked():
        with waiting(f"compiling {computation.name}, after what another thread compiles", settings.progress), lock:
            pass


def _of_kin(computation: Computation, settings: Settings) -> Executable | None:
    """The executable that this process has for another device which runs the same code."""
    device, homes, region = settings.device, computation.homes, computation.region
    for other in device.kin:
        found = MEMORY.get(identity(computation, (settings.bounds, precision.switches(), other.name)))
        if found is not None:
            outputs = [homes[v] for v in region.outputs]
            return loaded_for(found, outputs, device, wanted(region, homes, device))
    return None


def _load_or_compile(computation: Computation, settings: Settings) -> Executable:
    bounds, progress, keeper = settings.bounds, settings.progress, settings.keeper

    def make() -> Made:
        # One at a time: XLA takes all cores by itself.
        _others(_LOCK, computation, settings)
        with _LOCK, waiting(f"compiling {computation.name}", progress):
            emit.compiling(computation.name)
            made = build(computation, bounds, settings.in_subprocess, settings.device)
        emit.compiled(computation, bounds, made)
        return made

    if keeper is None or computation.devices:  # no process may load it by itself
        return make().executable
    return keeper.load_or_make(computation, bounds, progress, make, settings.device)


def trace(computation: Computation, bounds: bool, platform: str = "cpu") -> jax.core.ClosedJaxpr:
    """A region's function, traced as it is lowered for a platform.

    Raises:
        NodeFailed: one of its nodes has no lowering.
    """
    from ..lowering.lower import Function

    with tracing_for(), lowering_for(platform):
        return jax.make_jaxpr(Function(computation.nodes, computation.region, bounds))(*arguments_of(computation))


def arguments_of(computation: Computation, device: Device = HOST) -> list[jax.ShapeDtypeStruct]:
    """What a region's function takes, by shape and dtype: its inputs, then its numbers."""
    homes, kinds = computation.homes, computation.kinds
    on = None if device.has_memory else jax.sharding.SingleDeviceSharding(device.xla)
    arguments = [(homes[v][1], JAX_DTYPE[homes[v][0]]) for v in computation.region.inputs]
    arguments += [((kinds.count(kind),), np.dtype(dtype)) for kind, dtype in ((float, "float64"), (int, "int64"))]
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape, dtype in arguments]


@dataclass(frozen=True, slots=True)
class Lowering:
    """A region on its way to XLA: JAX's `Lowered`, the checks it makes, the scratch memory it takes beside its
    arguments, and how its rows were cut into blocks, in words."""

    lowered: jax.stages.Lowered
    checks: tuple[RunCheck, ...]
    scratch: tuple[Home, ...]
    blocks: str


def lower(computation: Computation, bounds: bool, device: Device = HOST) -> Lowering:
    """Trace a region and lower it for a device, be that here or only a target.

    Raises:
        NodeFailed: one of its nodes has no lowering.
    """
    from ..lowering.lower import Function  # and JAX with it
    from ..lowering.rewrites import REWRITE

    region, homes = computation.region, computation.homes
    function = Function(computation.nodes, region, bounds)
    with tracing_for(device):
        scratch = wanted(region, homes, device)
        avals = arguments_of(computation, device)
        avals += [jax.ShapeDtypeStruct(shape, JAX_DTYPE[dtype]) for dtype, shape in scratch]
        donated = (*region.donated, *range(len(avals) - len(scratch), len(avals)))
        traced, blocks = _of_bucket(function, computation, bounds) if computation.smaller else function, ""
        if REWRITE.here is not None:
            may_gain, rewritten = REWRITE.here
            if may_gain(avals, _is_pointwise(computation)):
                traced, blocks = rewritten(jax.make_jaxpr(traced)(*avals), donated)
        if devices := computation.devices:
            traced, avals = _of_ranks(traced, avals, devices)
        jitted = jax.jit(traced, donate_argnums=donated, keep_unused=True).trace(*avals)
        lowered = jitted.lower()
        xla.let_go(jitted)
    _as_promised(lowered, [homes[v] for v in region.outputs], len(function.checks))
    position = {i: p for p, i in enumerate(region.nodes)}
    checks = tuple(RunCheck(position[i], c.error, c.message) for i, c in function.checks)
    return Lowering(lowered, checks, scratch, blocks)


def _of_ranks(traced: Any, avals: Sequence[Any], devices: str) -> tuple[Any, list[Any]]:
    """A function as one program of several ranks' devices, and what it takes: on each of them that rank's own arrays,
    which XLA takes for copies of one."""
    mesh, alike = collectives.mesh(devices), jax.sharding.PartitionSpec()
    laid = jax.sharding.NamedSharding(mesh, alike)
    taken = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=laid) for a in avals]
    return jax.shard_map(traced, mesh=mesh, in_specs=alike, out_specs=alike, check_vma=False), taken


def _as_promised(lowered: jax.stages.Lowered, outputs: Sequence[Home], rows: int) -> None:
    """What is called afterwards is looked at no more: results are taken for arrays of the dtypes and shapes of their
    homes, whatever bytes come.

    Raises:
        ValidationError: a function returns other arrays than its region.
    """
    promised = [(JAX_DTYPE[dtype], shape) for dtype, shape in outputs]
    promised.append((np.dtype("int64"), (max(rows, 1), 2)))
    made = [(np.dtype(out.dtype), tuple(out.shape)) for out in jax.tree_util.tree_leaves(lowered.out_info)]
    if made != promised:
        raise ValidationError(f"lowering: a function returns {made}, and its region {promised}")


def _of_bucket(function: Any, computation: Computation, bounds: bool) -> Any:
    """The function of a region for all sizes of its bucket."""
    from ..lowering.lower import Function
    from ..lowering.padding import padded

    def traced(function: Any, of: Computation) -> jax.core.ClosedJaxpr:
        return jax.make_jaxpr(function)(*arguments_of(replace(of, smaller=())))

    (low, least), (middle, between) = computation.smaller
    outputs = len(computation.region.outputs)

    def made_of_traces() -> Any:
        of = [Function(c.nodes, c.region, bounds) for c in (computation, least, between)]  # anew: JAX keeps traces
        traces = [traced(f, c) for f, c in zip(of, (computation, least, between), strict=True)]
        function.checks[:] = of[0].checks
        return padded(traces[0], traces[1], traces[2], (computation.size, low, middle), outputs)

    try:
        made = made_of_traces()
    except Refused:
        with lowering_for(ANY):  # which forms are good for a platform hangs on sizes
            made = made_of_traces()
    return lambda *arrays: (lambda found: (found[:outputs], found[outputs]))(made(*arrays))


def build(computation: Computation, bounds: bool, in_subprocess: bool = True, device: Device = HOST) -> Made:
    """Trace, lower and compile a region; `subprocess_compiler`: in a process of XLA's own, where that can be.

    Raises:
        NodeFailed: one of its nodes has no lowering.
    """
    is_ours_alone = not computation.devices
    in_subprocess = in_subprocess and is_ours_alone
    if in_subprocess:
        with lowering_for(device.xla.platform):
            get_ready(background.nice())
    started = time.perf_counter()
    made = lower(computation, bounds, device)
    tracing = time.perf_counter() - started
    with tracing_for(device):
        compiled = _compiled if is_ours_alone else _of_all
        loaded, portable, beside = compiled(made.lowered, in_subprocess, device)
    seconds = time.perf_counter() - started
    outputs = [computation.homes[v] for v in computation.region.outputs]
    taken = computation.taken(made.scratch)
    if is_ours_alone and (wrong := misfit_on(device, loaded, taken, outputs, len(made.checks))):
        raise ValidationError(f"compiling: of {computation.name}, {wrong}")
    call = direct(loaded, outputs, len(made.checks), device, made.scratch)
    code = portable if device.kin and isinstance(portable, Portable) else None
    executable = Executable(call, made.checks, seconds, computation.name, needs=needs(loaded), code=code)
    return Made(executable, made.lowered, portable, tracing, made.blocks, beside)


def _compiled(
    lowered: jax.stages.Lowered, in_subprocess: bool, device: Device
) -> tuple[Any, Portable | NotPortable, bool]:
    """The executable, its bytes, and whether it was compiled apart."""
    if background.is_closing():
        raise Abandoned
    if in_subprocess:
        try:
            return *made_in_subprocess(lowered, background.nice(), device.xla), True
        except Unavailable as why:
            if str(why):
                LOG.count(f"regions compiled in this process: {why}")
    return *finalize(lowered, xla.compiled(lowered, device.xla.platform), device.xla), False


def _of_all(
    lowered: jax.stages.Lowered, in_subprocess: bool, device: Device
) -> tuple[Any, Portable | NotPortable, bool]:
    """The same of a program of several ranks: no process loads it by itself."""
    return xla.compiled(lowered, device.xla.platform).runtime_executable(), NotPortable("it is several ranks'"), False


_IN_ONE_LOOP = (OpClass.POINTWISE, OpClass.FACTORY, OpClass.REDUCTION)


def _is_pointwise(computation: Computation) -> bool:
    rules = [rule_for(node.twin) for node in computation.chosen]
    return all(rule is not None and rule.cls in _IN_ONE_LOOP for rule in rules)


@contextmanager
def tracing_for(device: Device = HOST) -> Iterator[None]:
    """No line of this library in the machine code: tracing is a third faster, and no path of this machine is kept.
    x64 is switched on for this trace alone: the user's own JAX code keeps its setting. Constants are made on the host
    where the device is only a target."""
    option = getattr(jax._src.config, "traceback_in_locations_limit", None)
    here = device.xla if device.is_here else xla.device()
    unnamed = nullcontext() if option is None else option(0)
    with xla.enable_x64(True), jax.default_device(here), lowering_for(device.xla.platform), unnamed:
        yield


__all__ = ["MEMORY", "Computation", "Executable", "RunCheck", "Settings", "build", "load_or_compile", "trace"]
