"""The backlog: runs whose checks nobody has looked at, and the undoing of what depended on a failure.

Regions report failed checks (an index out of range) in an array of flags that nobody waits for until a value is
read. Then the runs since the last look are checked in order; the first failure is raised, and every buffer
that depended on it returns to what it held before, or is lost and says so.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from fused_eager.fusion_rules.deferred import jax
from fused_eager.fusion_rules.lowering import EXCEPTIONS, text_of

from ..compiling.compile import RunCheck
from ..devices.buffer import LOCK, Buffer
from ..devices.home import home_of
from ..errors import LostValue
from ..log.site import describe
from ..planning.plan import Region
from ..tracing.stream import STREAMS, DeviceInput, Node


@dataclass(eq=False)
class Run:
    """One execution of a stream, kept until its checks have been looked at."""

    serial: int
    thread: int  # whose ops they are
    nodes: list[Node]
    origins: dict[int, tuple[int, int]]  # input value -> what made it
    assigned: list[tuple[Buffer, int, jax.Array | None, tuple[int, int] | None]] = field(default_factory=list)
    flags: list[tuple[Region, jax.Array, tuple[RunCheck, ...]]] = field(default_factory=list)
    # Values that are what they were written over, in the same memory, if a check that they depend on has failed.
    committed: frozenset[int] = frozenset()

    def commit(self, values: frozenset[int], args: list[Any], donated: tuple[int, ...]) -> None:
        """A region is about to write `values` over inputs that tensors go back to if a check fails. Where one of an
        earlier region has, which is waited for, `args` become copies."""
        if not values:
            return
        if any(np.asarray(flags)[: len(checks), 0].any() for _, flags, checks in self.flags):
            for p in donated:
                args[p] = args[p].copy()
        else:
            self.committed |= values


@dataclass(eq=False)
class Launch:
    """What one flush has started: its completion tokens, and the memory of the host that it reads until then."""

    tokens: list[jax.Array] = field(default_factory=list)
    reading: dict[int, torch.UntypedStorage | None] = field(default_factory=dict)
    numbers: list[np.ndarray] = field(default_factory=list)  # hoisted ones, whose memory it reads as well
    large: list[tuple[jax.Array, int]] = field(default_factory=list)  # tokens of regions that take much memory, and it

    def is_done(self) -> bool:
        """Whether everything has finished."""
        return all(t.is_ready() for t in self.tokens)

    def wait(self) -> None:
        """Wait until everything has finished."""
        for t in self.tokens:
            t.block_until_ready()


AHEAD = 32  # flushes that may be under way before the next one waits for the oldest: memory stays bounded


@dataclass
class DeferredChecks:
    """What has been launched and not yet been waited for, and the runs whose checks have not been looked at."""

    runs: list[Run] = field(default_factory=list)
    launches: deque[Launch] = field(default_factory=deque)
    serial: int = 0
    # Failures that could not be told where they were found, each with the thread whose op failed.
    owed: list[tuple[int, Exception]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to wait for, to look at, or to tell."""
        return not (self.launches or self.runs or self.owed)

    def under_way(self) -> int:
        """The bytes that large regions take which may still be running: they have been started, and XLA takes the
        memory when their turn comes."""
        return sum(needs for launch in self.launches for token, needs in launch.large if not token.is_ready())

    def is_reading(self, cdata: int) -> bool:
        """Whether a launch that may still be running reads the native storage at this address."""
        return any(cdata in launch.reading for launch in self.launches)

    def launch(self) -> Launch:
        """Start the record of one more flush; forget those that have finished."""
        while len(self.launches) >= AHEAD:
            with suppress(RuntimeError):  # what a value has failed with is told to whoever reads it
                self.launches.popleft().wait()
        self.forget_done()
        self.launches.append(Launch())
        return self.launches[-1]

    def forget_done(self) -> None:
        """Forget the oldest launches that have finished."""
        while self.launches and self.launches[0].is_done():
            self.launches.popleft()


DEFERRED = DeferredChecks()


def check() -> None:
    """Evaluate the checks of all runs so far; a thread is told of its own ops, and of those of threads that have ended.

    Raises:
        IndexError, RuntimeError, ...: what eager raises; the op and its line are in the message.
    """
    error = _first_error()
    if error is not None:
        try:
            raise error
        finally:
            del error  # this frame is in its traceback: they would keep each other


def untold() -> Exception | None:
    """At the end of the process: the first failure of all runs that nobody has been told of, in whichever thread."""
    with LOCK:
        error = _first_error()
        return error or next((owed for _, owed in DEFERRED.owed), None)


def _first_error() -> Exception | None:
    """The first error of all runs so far that this thread is to be told of."""
    with LOCK:
        errors, DEFERRED.owed = DEFERRED.owed, []
        for k, run in enumerate(DEFERRED.runs):
            for region, flags, checks in run.flags:
                failed = np.asarray(flags)
                bad = [(c, int(failed[row, 1])) for row, c in enumerate(checks) if failed[row, 0]]
                for index, check, value in sorted([(region.nodes[c.node], c, v) for c, v in bad], key=itemgetter(0)):
                    error = _error(run.nodes[index], check, value)
                    errors.append((run.thread, error))
                    _taint(DEFERRED.runs[k:], index, error)
        # Only now: an interrupt while we waited must not lose a check.
        DEFERRED.runs = []
        if errors:
            others = {t.ident for t in threading.enumerate()} - {threading.get_ident()}
            DEFERRED.owed = [(thread, error) for thread, error in errors if thread in others]
            return next((error for thread, error in errors if thread not in others), None)
    return None


def _error(node: Node, check: RunCheck, value: int) -> Exception:
    kind = EXCEPTIONS[check.error]
    return kind(f"{text_of(check.message, value)} (raised by {node.op} at {describe(node.place)})")


def _taint(runs: list[Run], index: int, error: Exception) -> None:
    """Undo everything that depends on node `index` of the first run, and take back what is pending and would."""
    bad: set[tuple[int, int]] = set()
    for k, run in enumerate(runs):
        wrong = {vid for vid, origin in run.origins.items() if origin in bad}
        if k == 0:
            wrong.update(r.vid for r in run.nodes[index].results)
        bad.update((run.serial, vid) for vid in _dependent(run.nodes, wrong))
    for stream in STREAMS:
        wrong = {i.vid for i in stream.inputs if isinstance(i, DeviceInput) and i.origin in bad}
        wrong = _dependent(stream.nodes, wrong)
        for b in [b for b in stream.pending.values() if b.vid in wrong]:
            del stream.pending[b.cdata]
            undo(b, b.previous, b.origin, error)
    for run in reversed(runs):
        for b, vid, array, origin in reversed(run.assigned):
            if (run.serial, vid) in bad and b.origin == (run.serial, vid) and b.cdata in b.table:
                undo(b, array, origin, error, vid in run.committed)


def _dependent(nodes: list[Node], wrong: set[int]) -> set[int]:
    """The values `wrong`, and all that were computed from them."""
    found = set(wrong)
    for node in nodes:
        if found and ({u.vid for u in node.uses} | {r.base for r in node.results}) & found:
            found.update(r.vid for r in node.results)
    return found


def undo(
    b: Buffer,
    array: jax.Array | None,
    origin: tuple[int, int] | None,
    error: BaseException,
    committed: bool = False,
) -> None:
    """Give a buffer back the value it had before a failed run; a tensor that the run would have made is lost.

    `committed`: what the run has made is that value, in its memory.
    """
    b.stream = b.previous = None
    if array is not None and array.is_deleted() and committed:
        b.origin = origin
    elif array is not None and not array.is_deleted():
        b.array, b.origin, b.home = array, origin, home_of(array)
    elif b.born_native and origin is None:
        b.release()
    else:
        b.array, b.error = None, _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """An exception to keep: in the frames of the one that is raised are the program's tensors, the lost one too, which
    would keep itself alive for ever."""
    try:
        kept = copy.copy(error)
    except Exception:  # of somebody's own class, which takes other arguments
        kept = None
    return kept if type(kept) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")


def lost(b: Buffer) -> LostValue:
    """The exception for reading a buffer whose value was never computed."""
    out = LostValue(
        f"this tensor was never computed, because an earlier op failed: {type(b.error).__name__}: {b.error}"
    )
    out.__cause__ = b.error
    return out


def wait() -> None:
    """Wait until everything that was launched so far has finished. Others may record and launch meanwhile."""
    with LOCK:
        launches = list(DEFERRED.launches)
    for launch in launches:
        launch.wait()
    with LOCK:
        DEFERRED.forget_done()
