"""Measuring: what only a stop-watch can tell, taken from samples so that the rest of the run is left alone.

XLA runs asynchronously, so the time between two calls says nothing about a region. Where details are wanted, a few
flushes of each plan are therefore run one region at a time, waiting before and after each: the 2nd, 4th, 8th, 16th
and every 32nd. Those times are of regions running *alone*. The ops recorded after such a flush are timed as well.
With torch's profiler running, each region is a named range of it, which tells its ops with their lines and ends when
the region has been computed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import profiled
from ..log.events import LOG
from ..log.site import describe

if TYPE_CHECKING:
    from ..planning.plan import Region
    from ..tracing.stream import Node
    from .ready import Ready

EVERY = 32
_Range = torch._C._profiler._RecordFunctionFast  # of what a range of `record_function` tells no text arrives
LONGEST = 4096  # characters: what a range tells of its ops
every_run = False  # measure all of them: for `explain`
_flushes: Counter[int] = Counter()  # by plan number


class Execution(Protocol):
    """A flush under way: what runs the stream, the region that comes next, and the values that are there."""

    ready: Ready
    nodes: list[Node]
    next: int
    values: dict[int, Any]


def watch(execution: Execution) -> Watch | None:
    """The stop-watch for one flush; None for most."""
    named = profiled.on
    if not (LOG.detailed or named):
        return None
    timed = LOG.detailed and _is_sampled(execution.ready.number)
    return Watch(execution, timed, named) if timed or named else None


def _is_sampled(plan: int) -> bool:
    _flushes[plan] = n = _flushes[plan] + 1
    if every_run:
        return True
    return n % EVERY == 0 or (1 < n < EVERY and n & (n - 1) == 0)


class Watch:
    """Times, or names, the regions of one flush."""

    def __init__(self, execution: Execution, timed: bool, named: bool):
        self.execution = execution
        self.timed = timed
        self.named = named
        self.started = 0.0
        self.range: Any = None

    def begin(self, region: Region) -> None:
        """Before a region is run."""
        if self.timed or self.named:
            self._wait(region.inputs)
            self.started = time.perf_counter()
        if self.named:
            executable = self.execution.ready.executables[self.execution.next]
            name = f"{len(region.nodes)} ops on ATen" if executable is None else executable.name
            self.range = _Range(f"fused_eager: {name}", (), {"ops": self._lines(region)})
            with profiled.shown():
                self.range.__enter__()

    def end(self, region: Region) -> None:
        """After it has been launched."""
        if self.timed or self.named:
            self._wait(region.outputs)
        if self.range is not None:
            with profiled.shown():
                self.range.__exit__(None, None, None)
            self.range = None
        if self.timed:
            number = self.execution.next
            how = "aten" if self.execution.ready.executables[number] is None else "xla"
            LOG.emit(
                "run",
                plan=self.execution.ready.number,
                region=number,
                how=how,
                seconds=time.perf_counter() - self.started,
            )
            _thread.wanted = True

    def _lines(self, region: Region) -> str:
        """The ops of a region by their lines, for its range."""
        lines: dict[str, list[str]] = {}
        for i in region.nodes:
            node = self.execution.nodes[i]
            lines.setdefault(str(describe(node.place)), []).append(node.op._opname)
        text = "; ".join(f"{line}: {', '.join(ops)}" for line, ops in lines.items())
        return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."

    def _wait(self, vids: tuple[int, ...]) -> None:
        for vid in vids:
            value: Any = self.execution.values.get(vid)
            if hasattr(value, "block_until_ready") and not value.is_deleted():
                value.block_until_ready()


# ---- recording ---------------------------------------------------------------------------------------------------

_measured: dict[type, type] = {}


def _measured_class(kind: type[TorchDispatchMode]) -> type:
    """The class of a front door that times its ops. An instance changes its class for the length of a stream."""
    found = _measured.get(kind)
    if found is not None:
        return found

    class Measured(kind):  # type: ignore[misc, valid-type]
        plain = kind

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            timing = self.timing
            if timing.inside:
                return kind.__torch_dispatch__(self, func, types, args, kwargs)
            timing.inside = True
            started = time.perf_counter()
            try:
                return kind.__torch_dispatch__(self, func, types, args, kwargs)
            finally:
                timing.inside = False
                timing.spent += time.perf_counter() - started

    _measured[kind] = Measured
    return Measured


class _Doors:
    """Whose ops are timed."""

    current: Callable[[], Any] | None = None  # the calling thread's front door


def time_ops_of(current: Callable[[], Any]) -> None:
    """Time the ops of the front door that the calling thread has: `current` finds it."""
    _Doors.current = current


def _door() -> Any:
    return None if _Doors.current is None else _Doors.current()


class _Timing:
    """What one stream's ops have taken so far. An op that ended the stream before adds its time to nobody's."""

    spent = 0.0
    inside = False


class _Thread(threading.local):
    wanted = False  # time the ops of the next stream


_thread = _Thread()


def recorded(ops: int) -> None:
    """A stream of `ops` ends here: tell what recording it took, if that was timed, and time the next if it is to be."""
    if not (_measured or _thread.wanted):
        return
    door = _door()
    if door is None:
        return
    if hasattr(door, "timing"):
        if ops and door.timing.spent > 0:
            LOG.emit("recording", ops=ops, seconds=door.timing.spent)
        door.__class__ = door.plain
        del door.timing
    if _thread.wanted:
        _thread.wanted = False
        door.__class__ = _measured_class(type(door))
        door.timing = _Timing()


def not_recording(seconds: float) -> None:
    """A wait that was not for recording ends here; if it was inside an op that is being timed, it does not count."""
    door = _door() if _measured else None
    if door is not None and hasattr(door, "timing") and door.timing.inside:
        door.timing.spent -= seconds
