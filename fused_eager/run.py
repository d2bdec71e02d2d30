"""Running: a flush plans the stream, runs the regions in order and hands the values to the buffers that still live.

XLA returns before the work is done, so a flush does not wait; `settle` does, for one buffer. What only run time can
reveal (an index out of range) comes back as flags and is verified before anything is read, and before memory is
given away that would be needed to undo.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from . import buffers, plan
from .buffers import LOCK, TABLE, Buffer, Home
from .compile import Executable, RunCheck, load_or_compile
from .errors import LostValue
from .events import LOG
from .island import run_nodes
from .lower import NodeFailed
from .plan import Plan, Region
from .quiet import unobserved
from .reasons import Reason
from .site import describe
from .stream import NativeInput, Node, Stream


@functools.cache
def host_device() -> Any:
    """JAX's CPU device, whose memory is the host's."""
    return jax.devices("cpu")[0]


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan with its executables (None for ATen regions): everything a repeated stream needs."""

    plan: Plan
    executables: tuple[Executable | None, ...]
    checked: bool


READY: dict[Hashable, Ready] = {}
# Calls that XLA turned out not to be able to run, by structure number: found once, islands from then on.
ISLANDS: dict[int, str] = {}
# Structures whose lowering asks for run-time checks.
CHECKING: set[int] = set()


@dataclass(eq=False)
class Run:
    """One execution of a stream, kept until its checks have been verified."""

    serial: int
    nodes: list[Node]
    origins: dict[int, tuple[int, int]]  # input value -> what made it
    assigned: list[tuple[Buffer, int, jax.Array | None, tuple[int, int] | None]] = field(default_factory=list)
    flags: list[tuple[Region, jax.Array, tuple[RunCheck, ...]]] = field(default_factory=list)


@dataclass
class Backlog:
    """What has been launched and not yet been waited for."""

    runs: list[Run] = field(default_factory=list)
    tokens: list[jax.Array] = field(default_factory=list)
    reading: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    serial: int = 0


BACKLOG = Backlog()


class Execution:
    """The progress of one flush. An interrupt leaves it resumable: values are never computed into thin air."""

    def __init__(self, stream: Stream, ready: Ready, assigned: list[tuple[Buffer, int]], reason: Reason):
        self.ready = ready
        self.nodes = stream.nodes
        self.reason = reason
        self.next = 0
        self.assigned = assigned
        self.values: dict[int, Any] = {}
        BACKLOG.serial += 1
        origins = {i.vid: i.origin for i in stream.inputs if not isinstance(i, NativeInput) and i.origin is not None}
        self.run = Run(BACKLOG.serial, stream.nodes, origins)
        for item in stream.inputs:
            self.values[item.vid] = item.array
            if isinstance(item, NativeInput):
                BACKLOG.reading[item.storage._cdata] = item.storage
                if item.array is None:
                    self.values[item.vid] = import_native(item)

    def advance(self) -> None:
        """Run the regions that have not been run."""
        plan = self.ready.plan
        while self.next < len(plan.regions):
            region = plan.regions[self.next]
            executable = self.ready.executables[self.next]
            if executable is None:
                run_nodes(self.nodes, region, self.values, host_device())
            else:
                self._xla(region, executable)
            for vid in plan.drops[self.next]:
                self.values.pop(vid, None)
            self.next += 1

    def _xla(self, region: Region, executable: Executable) -> None:
        args = [as_array(self.values[v]) for v in region.inputs]
        scalars = [s for i in region.nodes for s in self.nodes[i].scalars]
        floats = [s for s in scalars if type(s) is float]
        ints = [s for s in scalars if type(s) is int]
        outputs, flags = executable.call(*args, _vector(floats, torch.float64), _vector(ints, torch.int64))
        self.values.update(zip(region.outputs, outputs, strict=True))
        BACKLOG.tokens.append(flags)
        if executable.checks:
            self.run.flags.append((region, flags, executable.checks))


def import_native(item: NativeInput) -> jax.Array:
    """The array over a native input's memory, which the caller keeps alive."""
    return buffers.to_array(buffers.alias(item.storage, item.offset, item.home), host_device())


@functools.cache
def _empty(dtype: torch.dtype) -> jax.Array:
    return buffers.to_array(torch.empty(0, dtype=dtype), host_device())


def _vector(numbers: list[Any], dtype: torch.dtype) -> jax.Array:
    if not numbers:
        return _empty(dtype)
    return buffers.to_array(torch.tensor(numbers, dtype=dtype, device="cpu"), host_device())


def as_array(value: Any) -> jax.Array:
    """A value of an execution as a JAX array; islands leave torch tensors."""
    return buffers.to_array(value, host_device()) if isinstance(value, torch.Tensor) else value


def flush(stream: Stream, reason: Reason) -> None:
    """Run everything that is pending in a stream, without waiting for it.

    Raises:
        Exception: what an op raised that ran natively, with eager's type; tensors that depended on it are lost and
            say so, all others are valid.
    """
    with stream.lock, unobserved():
        if stream.unfinished is not None:
            _finish(stream)
        if stream.nodes:
            stream.unfinished = _prepare(stream, reason)
            stream.reset()
            _finish(stream)
        elif stream.inputs:
            stream.reset()


def _prepare(stream: Stream, reason: Reason) -> Execution:
    buffers.sweep()
    nodes = stream.nodes
    live: set[int] = set()
    assigned: list[tuple[Buffer, int]] = []
    for cdata, b in list(stream.pending.items()):
        if not b.is_alive():
            if TABLE.get(cdata) is b:
                del TABLE[cdata]
            continue
        live.add(b.vid)
        if b.stream is stream:
            assigned.append((b, b.vid))
    overwritten = {b.cdata for b, _ in assigned}
    donatable = set()
    for i in stream.inputs:
        if isinstance(i, NativeInput):
            if i.storage._cdata in overwritten:
                donatable.add(i.vid)
        elif i.vid not in live:
            donatable.add(i.vid)
    signature = (
        tuple([n.signature for n in nodes]),
        tuple([(i.vid, i.home) for i in stream.inputs]),
        frozenset(live),
        frozenset(donatable),
        stream.config.check_bounds,
        stream.config.max_region,
    )
    ready = READY.get(signature)
    if ready is None:
        ready = READY[signature] = _make_ready(stream, frozenset(live), frozenset(donatable), reason)
    if donatable and not ready.checked and BACKLOG.runs:
        # From here on memory is reused in place, so what came before has to be known to be right.
        verify()
    LOG.emit("flush", reason=reason.code, detail=reason.detail, ops=len(nodes), regions=len(ready.plan.regions))
    return Execution(stream, ready, assigned, reason)


def _make_ready(stream: Stream, live: frozenset[int], donatable: frozenset[int], reason: Reason) -> Ready:
    nodes, config = stream.nodes, stream.config
    homes: dict[int, Home] = {i.vid: i.home for i in stream.inputs}
    homes.update({r.vid: r.home for n in nodes for r in n.results})
    while True:
        islands = {i: ISLANDS[n.signature[0]] for i, n in enumerate(nodes) if n.signature[0] in ISLANDS}  # type: ignore[index]
        checked = any(n.signature[0] in CHECKING for n in nodes)  # type: ignore[index]
        made = plan.make_plan(
            nodes, live, frozenset() if checked else donatable, homes, islands, config.max_region, reason
        )
        if config.validates:
            plan.validate(made, nodes, live)
        try:
            executables = tuple(
                load_or_compile(nodes, r, homes, config.check_bounds, config.progress) if r.how == "xla" else None
                for r in made.regions
            )
        except NodeFailed as failed:
            _make_island(nodes[failed.index], failed.reason)
            continue
        if not checked:
            asking = [(r, c) for r, e in zip(made.regions, executables, strict=True) if e for c in e.checks]
            CHECKING.update(nodes[r.nodes[c.node]].signature[0] for r, c in asking)  # type: ignore[index]
            if asking and donatable:
                continue
        if config.log == "plans":
            print(made, flush=True)
        return Ready(made, executables, checked)


def _make_island(node: Node, reason: str) -> None:
    ISLANDS[node.signature[0]] = reason  # type: ignore[index]
    LOG.emit("island", op=str(node.op), reason=reason, site=str(describe(node.place)))


def _finish(stream: Stream) -> None:
    execution = stream.unfinished
    assert execution is not None
    try:
        execution.advance()
    except Exception as error:
        stream.unfinished = None
        _keep_what_is_there(execution, error)
        raise
    _assign(execution, execution.assigned)
    stream.unfinished = None


def _assign(execution: Execution, pairs: list[tuple[Buffer, int]]) -> None:
    run = execution.run
    for b, vid in pairs:
        run.assigned.append((b, vid, b.previous, b.origin))
        b.array = as_array(execution.values[vid])
        b.stream = b.previous = None
        b.origin = (run.serial, vid)
    if run.flags or BACKLOG.runs:
        BACKLOG.runs.append(run)


def _keep_what_is_there(execution: Execution, error: Exception) -> None:
    """After a failure: bind what was computed, mark the rest as lost."""
    done = [(b, vid) for b, vid in execution.assigned if vid in execution.values]
    _assign(execution, done)
    for b, vid in execution.assigned:
        if vid not in execution.values:
            _undo(b, b.previous, b.origin, error)


def _undo(b: Buffer, array: jax.Array | None, origin: tuple[int, int] | None, error: BaseException) -> None:
    """Give a buffer back the value it had before a failed run; a tensor that the run would have made is lost."""
    b.stream = b.previous = None
    if array is not None and not array.is_deleted():
        b.array, b.origin, b.home = array, origin, buffers.home_of(array)
    elif b.born_native and origin is None:
        buffers.release(b)
    else:
        b.array, b.error = None, error


def lost(b: Buffer) -> LostValue:
    """The exception for reading a buffer whose value was never computed."""
    out = LostValue(
        f"this tensor was never computed, because an earlier op failed: {type(b.error).__name__}: {b.error}"
    )
    out.__cause__ = b.error
    return out


def wait() -> None:
    """Wait until everything that was launched has finished."""
    for token in BACKLOG.tokens:
        token.block_until_ready()
    BACKLOG.tokens.clear()
    BACKLOG.reading.clear()


def verify() -> None:
    """Evaluate the checks of all runs so far.

    Raises:
        IndexError, RuntimeError, ...: what eager raises; the op and its line are in the message.
    """
    with LOCK:
        runs, BACKLOG.runs = BACKLOG.runs, []
        for k, run in enumerate(runs):
            for region, flags, checks in run.flags:
                failed = np.asarray(flags)
                bad = [(c, int(failed[row, 1])) for row, c in enumerate(checks) if failed[row, 0]]
                if bad:
                    first, value = min(bad, key=lambda item: item[0].node)
                    index = region.nodes[first.node]
                    error = _error(run.nodes[index], first, value)
                    _taint(runs[k:], index, error)
                    raise error


def _error(node: Node, check: RunCheck, value: int) -> Exception:
    kind = getattr(builtins, check.error)
    return kind(f"{check.message.replace('{value}', str(value))} (raised by {node.op} at {describe(node.place)})")


def _taint(runs: list[Run], index: int, error: Exception) -> None:
    """Undo everything that depends on node `index` of the first run."""
    bad: set[tuple[int, int]] = set()
    for k, run in enumerate(runs):
        wrong = {vid for vid, origin in run.origins.items() if origin in bad}
        for i, node in enumerate(run.nodes):
            reads = {u.vid for u in node.uses} | {r.base for r in node.results}
            if (k == 0 and i == index) or reads & wrong:
                wrong.update(r.vid for r in node.results)
        bad.update((run.serial, vid) for vid in wrong)
    for run in reversed(runs):
        for b, vid, array, origin in reversed(run.assigned):
            if (run.serial, vid) in bad and TABLE.get(b.cdata) is b and b.origin == (run.serial, vid):
                _undo(b, array, origin, error)


def settle(b: Buffer, reason: Reason) -> None:
    """Make a buffer's storage native: its value computed, verified, and in its memory.

    Raises:
        LostValue: an op that it depends on has failed.
        IndexError, ...: a check of something that was run before failed.
    """
    if b.stream is not None:
        flush(b.stream, reason)
    with LOCK:
        if b.error is None and b.array is not None:
            verify()
        if b.error is not None:
            raise lost(b)
        if b.array is None:
            return
        with unobserved():
            if b.cdata in BACKLOG.reading:
                wait()
            buffers.bind(b)


def settle_all(reason: Reason, only: Stream | None = None) -> None:
    """Bind every buffer that lives, of all streams or without those pending in others than `only`.

    A lost one stays lost; its own reader is told.
    """
    for b in list(TABLE.values()):
        if b.stream is not None and only in (None, b.stream):
            flush(b.stream, reason)
    buffers.sweep()
    verify()
    for b in list(TABLE.values()):
        if b.error is None and b.stream is None:
            settle(b, reason)
    wait()


__all__ = ["BACKLOG", "flush", "host_device", "lost", "settle", "settle_all", "verify", "wait"]
