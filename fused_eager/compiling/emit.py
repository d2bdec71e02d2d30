"""Telling: what the stages of the pipeline say to the event log. The one place that turns their objects into events.

A stage calls one function here, once per flush, wait, plan or compilation; nothing is called per op. What takes longer
to find out is done only where somebody asked for details: a report file, `explain`.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fused_eager.cache import Key

from ..bounded import Bounded
from ..devices.device import Device
from ..devices.home import Home, nbytes_of
from ..devices.host.device import HOST
from ..log.events import LOG
from ..log.reasons import Reason
from ..log.site import UNKNOWN, Site, caller, describe, is_internal
from ..planning.order import operands
from ..planning.plan import Plan, Region
from ..planning.room import wanted
from ..tracing.stream import Node
from . import background, causes, measuring
from .key import Computation
from .key_text import packed

if TYPE_CHECKING:
    from .executable import Executable, Made
    from .ready import Ready

now = time.perf_counter


class _Thread(threading.local):
    """Of one thread: when the runtime last gave control back to the program, and how long it has compiled so far."""

    ended: float | None = None
    compiled: float = 0.0

    def __init__(self) -> None:
        self.fresh: set[str] = set()  # names of what was compiled since the last plan


_thread = _Thread()

Began = tuple[float, float]


def begin() -> Began:
    """The start of something that is told when it ends."""
    return now(), _thread.compiled


def flushed(reason: Reason, ready: Ready, ops: int, began: Began, before: float = 0.0) -> None:
    """A flush has launched the regions of a stream of `ops`, which ATen had run for so many seconds `before`."""
    started, compiled = began
    ended = _thread.ended
    LOG.emit(
        "flush",
        reason=reason.code,
        detail=reason.detail,
        site=_line(reason.site),
        plan=ready.number,
        ops=ops,
        regions=len(ready.plan.regions),
        host=0.0 if ended is None else max(started - ended - before, 0.0),
        seconds=now() - started + before,
        native=before,
        compiling=_thread.compiled - compiled,
    )
    measuring.recorded(ops)
    _thread.ended = now()


def synced(reason: Reason, began: Began) -> None:
    """The program has waited for a value, from `began` until now."""
    started, compiled = began
    seconds = now() - started
    LOG.emit(
        "sync",
        reason=reason.code,
        detail=reason.detail,
        site=_line(reason.site),
        seconds=seconds,
        compiling=_thread.compiled - compiled,
    )
    measuring.not_recording(seconds)
    _thread.ended = now()


def _line(site: Site) -> str:
    return str(caller() if site is UNKNOWN else site)


# ---- plans -------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_numbers: Bounded[Any, int] = Bounded(4096)
_codes: WeakKeyDictionary[Executable, int] = WeakKeyDictionary()
_told = _made = 0


def planned(
    made: Plan,
    nodes: Sequence[Node],
    homes: Mapping[int, Home],
    executables: Sequence[Executable | None] = (),
    again: bool = False,
    instead_of: int | None = None,
    device: Device = HOST,
) -> int:
    """A stream was planned; returns the number by which flushes refer to the plan.

    With `again`, for streams that are planned whenever they come, a plan that was told before keeps its number.
    `instead_of` is the plan that ran the same stream until now, because it was not compiled.
    """
    global _told
    regions = [_region(r, nodes, homes, device) for r in made.regions]
    key = repr(regions) if again else None
    with _lock:
        number = _numbers.get(key) if again else None
        if number is not None:
            return number
        _told = number = _told + 1
        if again:
            _numbers[key] = number
        for told, region, executable in zip(regions, made.regions, executables, strict=False):
            if executable is not None:
                told["code"] = _code(executable, Computation(nodes, region, homes))
                told["name"] = executable.name
    _thread.fresh.clear()
    LOG.emit("plan", plan=number, regions=regions, instead_of=instead_of)
    return number


def _code(executable: Executable, computation: Computation) -> int:
    """The number of an executable: plans that differ in what is donated, or in other regions, may share one."""
    global _made
    found = _codes.get(executable)
    if found is None:
        _made += 1
        found = _codes[executable] = _made
        if executable.name not in _thread.fresh:
            # From a cache: what is compiled next is compared with it all the same.
            causes.MEMORY.cause(causes.of(computation, True))
    return found


def _region(r: Region, nodes: Sequence[Node], homes: Mapping[int, Home], device: Device) -> dict[str, Any]:
    """One region of a plan in plain values: `lines` are [line, module, backward, {op: count}] in program order."""
    lines: dict[tuple[str, str, bool], collections.Counter[str]] = {}
    inner = 0
    kept = set(r.outputs)
    for i in sorted(r.nodes):
        site = describe(nodes[i].place)
        ops = lines.setdefault((str(site), site.module, site.backward), collections.Counter())
        ops[str(nodes[i].op)] += 1
        inner += sum(nbytes_of(result.home) for result in nodes[i].results if result.vid not in kept)
    return {
        "how": r.how,
        "ops": len(r.nodes),
        "ended_by": r.ended_by.code,
        "detail": r.ended_by.detail,
        "site": str(r.ended_by.site) if r.ended_by.site is not UNKNOWN else "",
        "lines": [[*where, dict(ops)] for where, ops in lines.items()],
        "inputs": len(r.inputs),
        "outputs": len(r.outputs),
        "donated": len(r.donated),
        "read_bytes": sum(nbytes_of(homes[v]) for v in r.inputs),
        "written_bytes": sum(nbytes_of(homes[v]) for v in r.outputs),
        "donated_bytes": sum(nbytes_of(homes[r.inputs[p]]) for p in r.donated),
        "scratch_bytes": sum(map(nbytes_of, wanted(r, homes, device))) if r.how == "xla" else 0,
        "inner_bytes": inner,
    }


def came(nodes: Sequence[Node], homes: Mapping[int, Home], live: Collection[int], number: int) -> None:
    """A stream came in a form that had not come before, and ATen runs it, as the plan with this number."""
    # How it differs from those before it takes longer to find out than all else about a stream that comes once.
    LOG.emit_when_read("came", lambda: _about(nodes, homes, live, number))


def _about(nodes: Sequence[Node], homes: Mapping[int, Home], live: Collection[int], number: int) -> dict[str, Any]:
    made = {r.vid for n in nodes for r in n.results}
    inputs = dict.fromkeys(v for n in nodes for v in operands(n) if v not in made)
    outputs = tuple(v for v in made if v in live)
    whole = Region(tuple(range(len(nodes))), tuple(inputs), outputs, (), "aten", Reason("region.new"))
    cause = causes.CAME.cause(causes.of(Computation(nodes, whole, homes), ""))
    return {"plan": number, "ops": len(nodes), **_told_cause(cause)}


def _told_cause(cause: causes.Cause) -> dict[str, Any]:
    return {
        "cause": cause.code,
        "why": cause.why,
        "site": str(cause.site),
        "module": cause.site.module,
        "changes": [list(change) for change in cause.changes[:20]],
        "skeleton": cause.skeleton,
        "variant": cause.variant,
    }


# ---- compilations ------------------------------------------------------------------------------------------------


def compiling(name: str) -> None:
    """A compilation begins: told before, so that a log that ends here says what it was waiting for."""
    LOG.emit("compiling", region=name, waited=not background.is_own_thread())


def looked_for(name: str, key: Key) -> None:
    """A region is looked for in the cache: where a log is written, all that another host needs to compile it."""
    if LOG.sinks:
        LOG.emit("region", region=name, key=key.digest, parts=packed(key))


def compiled(computation: Computation, flags: object, made: Made) -> None:
    """A region was compiled."""
    region = computation.region
    name, seconds = made.executable.name, made.executable.seconds
    cause = causes.MEMORY.cause(causes.of(computation, flags))
    waited = not background.is_own_thread()
    _thread.compiled += seconds
    _thread.fresh.add(name)
    LOG.emit(
        "compile",
        region=name,
        ops=len(region.nodes),
        seconds=seconds,
        tracing=made.tracing,
        blocks=made.blocks,
        in_subprocess=made.in_subprocess,
        waited=waited,
        inputs=len(region.inputs),
        outputs=len(region.outputs),
        **_told_cause(cause),
    )


# ---- what is no stage --------------------------------------------------------------------------------------------


def parameter_made(module: Any, name: str, parameter: Any) -> None:
    """A module got a parameter. A module that is built again and again is worth a word.

    Told is the line that asked for the module, not those in its `__init__` that made its parts.
    """
    frame: FrameType | None = sys._getframe(1)
    place = None
    while frame is not None:
        if not is_internal(frame.f_code.co_filename):
            if frame.f_code.co_name != "__init__":
                place = frame.f_code, frame.f_lineno
                break
            place = place or (frame.f_code, frame.f_lineno)
        frame = frame.f_back
    LOG.emit("parameter", module=type(module).__name__, name=name, site=str(describe(place)))
