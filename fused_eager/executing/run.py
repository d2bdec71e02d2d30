"""Running: a flush plans the stream, runs the regions in order and hands the values to the buffers that still live.

XLA returns before the work is done, so a flush does not wait. What only run time
can reveal (an index out of range) comes back as flags, which are looked at before anything is read, and before memory
is given away that would be needed to undo.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..compiling import background, emit, measuring
from ..compiling.compile import Computation, Executable, Settings, load_or_compile
from ..compiling.ready import Ready
from ..devices.buffer import LOCK, Buffer, dead, sweep_before_run
from ..devices.dlpack import to_tensor
from ..devices.home import nbytes_of
from ..devices.storage import alias
from ..log.reasons import Reason
from ..planning.plan import Region
from ..policy.allowance import ALLOWANCE
from ..policy.hotness import SKELETONS
from ..quiet import uncompiled, unobserved
from ..tracing.stream import STREAMS, DeviceInput, NativeInput, Stream
from . import validate, verify
from .arguments import as_array, import_native, numbers
from .deferred_checks import DEFERRED, Run, check, lost, undo, wait
from .island import named, run_nodes, tell_region
from .load import RANKS, collectives_of, homes_of_values, is_compiled, load


class Execution:
    """The progress of one flush. An interrupt leaves it resumable: values are never computed into thin air."""

    def __init__(
        self,
        stream: Stream,
        ready: Ready,
        assigned: list[tuple[Buffer, int]],
        donatable: frozenset[int],
        reason: Reason,
    ):
        self.ready = ready
        self.nodes = stream.nodes
        self.device = stream.device
        self.reason = reason
        self.next = 0
        self.error: Exception | None = None
        self.assigned = assigned
        self.values: dict[int, Any] = {}
        self.config = stream.config
        self.verified = stream.config.verify
        self.validates = stream.config.validates and not ready.varies
        self.homes = homes_of_values(stream) if self.verified or self.validates else {}
        if self.validates:
            validate.bound(assigned, self.homes)
            validate.read(stream)
        DEFERRED.serial += 1
        self.launch = DEFERRED.launch()
        origins = {i.vid: i.origin for i in stream.inputs if not isinstance(i, NativeInput) and i.origin is not None}
        self.run = Run(DEFERRED.serial, stream.thread, stream.nodes, origins)
        for item in stream.inputs:
            self.values[item.vid] = item.array
            if isinstance(item, DeviceInput):
                # Once bound, this memory is open to native writes; they wait as for any other.
                self.launch.reading[item.buffer.cdata] = None
            if isinstance(item, NativeInput):
                self.launch.reading[item.storage._cdata] = item.storage
                if item.array is None:
                    self.values[item.vid] = import_native(item, stream.device, item.vid in donatable)

    def advance(self) -> None:
        """Run the regions that have not been run."""
        plan = self.ready.plan
        watch = measuring.watch(self)
        while self.next < len(plan.regions):
            region = plan.regions[self.next]
            executable = self.ready.executables[self.next]
            if watch is not None:
                watch.begin(region)
            if not (region.outputs and all(v in self.values for v in region.outputs)):
                try:
                    if executable is not None and self._is_too_large(region, executable):
                        executable = None
                    if executable is None or any(v not in self.values for v in region.inputs):
                        # Node by node, what does not depend on a failure goes on.
                        run_nodes(self.nodes, region, self.values, self.device)
                    else:
                        self._xla(region, executable)
                except Exception as error:
                    self.error = self.error or self.device.told(error, named(self.nodes, region))
            if watch is not None:
                watch.end(region)
            for vid in plan.drops[self.next]:
                self.values.pop(vid, None)
            self.next += 1
        if self.error is not None:
            raise self.error

    def _is_too_large(self, region: Region, executable: Executable) -> bool:
        """Whether a region needs more memory at once than there is, so that ATen is to run it, op by op.

        What others take that are under way counts; where that is too much together, they are waited for.
        """
        if executable.needs < LARGE or self._collectives(region):
            return False
        lacks = self.device.housekeeping.lacks
        before = DEFERRED.under_way()
        if before and lacks(executable.needs + before) is not None:
            wait()
        there = lacks(executable.needs)
        if there is None:
            return False
        needed, has = (f"{nbytes / 2**30:.1f} GB" for nbytes in (executable.needs, there))
        why = f"XLA needs {needed} at once for {executable.name}, and {has} are free"
        tell_region(self.config, self.nodes, region, why)
        return True

    def _collectives(self, region: Region) -> int:
        """How many a region holds."""
        return len(collectives_of([self.nodes[i] for i in region.nodes])) if RANKS else 0

    def _xla(self, region: Region, executable: Executable) -> None:
        args = [as_array(self.values[v], self.device) for v in region.inputs]
        if self.ready.commits:
            self.run.commit(self.ready.commits[self.next], args, region.donated)
        if any(args[p].is_deleted() for p in region.donated):
            raise RuntimeError("an interrupt came between a region's start and its results, which are lost")
        vectors = numbers(self.nodes, region, self.launch.numbers, self.device)
        if self.validates:
            validate.given(region, self.nodes, self.homes, args)
        kept = verify.keep(region, self.values) if verify.is_due(self.verified) else None
        account = self.device.account
        if account is not None and account.is_kept:
            account.count(self.device.table, self.values.values(), executable.needs)
        outputs, flags = executable.call(*args, *vectors)
        if self.validates:
            validate.computed(region, self.nodes, self.homes, outputs, flags, executable.checks)
        if kept is not None:
            outputs = verify.verify(Computation(self.nodes, region, self.homes), kept, outputs, run_alone)
        self.launch.tokens.append(flags)
        held = self._collectives(region)
        if held:
            RANKS[0].launched(held, flags)
        if executable.needs >= LARGE:
            self.launch.large.append((flags, executable.needs))
        if executable.checks:
            self.device.send(flags)
            self.run.flags.append((region, flags, executable.checks))
        # Last, and what tells that the region is done: an interrupt before it finds the region to be run.
        self.values.update(zip(region.outputs, outputs, strict=True))


def run_alone(computation: Computation, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run one region through XLA on dense inputs and wait for its outputs; nothing else of the runtime is touched.

    Raises:
        NodeFailed: one of its nodes has no lowering.
    """
    memory: list[np.ndarray] = []
    executable = load_or_compile(computation, Settings())
    outputs, _ = executable.call(*map(as_array, inputs), *numbers(computation.nodes, computation.region, memory))
    return [to_tensor(o) for o in outputs]


def is_needed(b: Buffer) -> bool:
    """Whether the value that was in a storage's own memory may be asked for again: by what is pending, or what has
    failed and is undone."""
    for stream in STREAMS:
        if stream.unfinished or any(isinstance(i, NativeInput) and i.storage is b.storage for i in stream.inputs):
            return True
    return any(of is b and origin is None for r in DEFERRED.runs for of, _, _, origin in r.assigned)


READ_CODES = frozenset({"sync.value", "sync.shape", "sync.memory"})  # the program has read a value: most loops go on so
LARGE = 16 << 20  # bytes of a region that count where memory is short; all smaller ones together are little
UNVERIFIED = 8  # runs whose checks may be open: each keeps what it would take to undo it


@uncompiled
def flush(stream: Stream, reason: Reason) -> None:
    """Run everything that is pending in a stream, without waiting for it.

    Raises:
        Exception: what an op raised that ran natively, with eager's type; tensors that depended on it are lost and
            say so, all others are valid.
    """
    with LOCK, unobserved():
        if not stream.strayed:  # else it has been given up in the middle
            stream.after_read = reason.code in READ_CODES
        if stream.unfinished is not None:
            _finish(stream)
        if stream.nodes:
            began, nodes = emit.begin(), len(stream.nodes)
            if stream.shadowed:
                first, at, seen = stream.first, stream.at, stream.shadowed
                emit.flushed(reason, _end(stream, seen.seconds, reason), nodes, began, seen.seconds)
                ALLOWANCE.ended(first, seen, time.perf_counter() - began[0], is_compiled(at))
            else:
                # One bytecode after the other, an interrupt finds either the nodes or their execution, or both.
                stream.unfinished = execution = _prepare(stream, reason)
                try:
                    _finish(stream)
                finally:
                    emit.flushed(reason, execution.ready, nodes, began)
                    stream.device.housekeeping.after_run()
            stream.device.housekeeping.look(is_needed, wait)
        elif stream.inputs:
            stream.reset()


def flush_first(buffers: Sequence[Buffer], reason: Reason) -> None:
    """Run what makes these buffers' values, and after that what else is pending in their streams, which runs while
    they are in use. Streams in which none of them is pending stay as they are. The caller holds the lock; raises as
    `flush`."""
    for stream in list({id(b.stream): b.stream for b in buffers if isinstance(b.stream, Stream)}.values()):
        stream.urgent = frozenset(b.vid for b in buffers if b.stream is stream)
        flush(stream, reason)


def run_ahead(stream: Stream, ready: Ready, donatable: frozenset[int], reason: Reason) -> dict[int, Any]:
    """Run a stream that was recorded and planned ahead, under the runtime's lock: its inputs are in native memory, and
    no storage waits for its values. Returns those, their checks passed.

    Raises:
        Exception: what an op raised, with eager's type.
    """
    execution = Execution(stream, ready, [], donatable, reason)
    execution.advance()
    if execution.run.flags:
        DEFERRED.runs.append(execution.run)
        check()
    return execution.values


def withdraw(stream: Stream, error: Exception) -> None:
    """Take back what is pending in a stream: the calls that recorded it raise `error`, so they have not happened."""
    with LOCK:
        if stream.nodes:
            for b in stream.pending.values():
                undo(b, b.previous, b.origin, error)
            stream.reset()


def values_needed(stream: Stream) -> tuple[frozenset[int], frozenset[int], list[tuple[Buffer, int]]]:
    """The values of a stream that some tensor sees, its inputs that none does, and the buffers which wait for values.
    Forgets the others."""
    table = stream.device.table
    sweep_before_run(table)
    pending, natives = stream.pending, [i for i in stream.inputs if type(i) is NativeInput]
    gone = set(dead(list(pending.values())))
    for cdata, held in Counter([i.storage._cdata for i in natives if i.storage._cdata in pending]).items():
        if not pending[cdata].is_alive(held):
            gone.add(pending[cdata])
    for b in gone:
        if table.get(b.cdata) is b:
            del table[b.cdata]
    assigned = [(b, b.vid) for b in pending.values() if b not in gone]
    live = {vid for _, vid in assigned}
    donatable = {i.vid for i in natives if i.storage._cdata in pending}
    others = [s.reads for s in STREAMS if s is not stream and s.reads]
    for i in stream.inputs:
        if isinstance(i, NativeInput):
            continue
        b = i.buffer
        if b.stream is None and b.array is i.array and table.get(b.cdata) is b and b.is_alive():
            live.add(i.vid)
        elif not (others and any(b.cdata in reads for reads in others)):
            donatable.add(i.vid)
    return frozenset(live), frozenset(donatable), assigned


def _end(stream: Stream, seconds: float, reason: Reason) -> Ready:
    """End a shadowed stream: all has been run, in so many seconds. Its results stay at home, and are taken for values
    on the device, for what comes next is to be recorded as it will be when this stream is compiled.
    """
    live, donatable, assigned = values_needed(stream)
    try:
        ready = load(stream, live, donatable, reason)
        if ready.shapes is not None:
            SKELETONS.ran(ready.shapes, stream.policy.backoff.weight * seconds)
            if background.is_quick(len(stream.nodes), SKELETONS.spent[ready.shapes]):
                stream.warm()  # when it comes next it is waited for
    finally:
        for b, _ in assigned:
            b.stream, b.maker = None, stream.thread
            if b.born_native:
                b.table.pop(b.cdata, None)
        stream.device.table.ran([b.cdata for b, _ in assigned], sum([b.storage.nbytes() for b, _ in assigned]))
        stream.reset()
    return ready


def _prepare(stream: Stream, reason: Reason) -> Execution:
    stream.device.housekeeping.before_run()
    live, donatable, assigned = values_needed(stream)
    ready = load(stream, live, donatable, reason)
    called = collectives_of(stream.nodes)
    if called and not RANKS[0].agree(called, ready.joint):
        ready = load(stream, live, donatable, reason, cuts=True)
    gives = ready.commits or (donatable and not ready.checked)
    if DEFERRED.runs and (len(DEFERRED.runs) >= UNVERIFIED or gives):
        # Where memory is reused in place, what came before has to be known to be right.
        check()
    return Execution(stream, ready, assigned, donatable, reason)


def _finish(stream: Stream) -> None:
    execution = stream.unfinished
    assert isinstance(execution, Execution)
    if stream.nodes is execution.nodes:
        stream.reset()
    shapes, began = execution.ready.shapes, time.perf_counter()
    try:
        execution.advance()
    except Exception as error:
        stream.unfinished = None
        _keep_what_is_there(execution, error)
        raise
    _assign(execution, execution.assigned)
    stream.unfinished = None
    if shapes is not None:
        SKELETONS.ran(shapes, stream.policy.backoff.weight * (time.perf_counter() - began))


def _assign(execution: Execution, pairs: list[tuple[Buffer, int]]) -> None:
    run = execution.run
    if execution.validates:
        validate.assigned(pairs, execution.values)
    shared = execution.ready.plan.shared
    for b, vid in pairs:
        if vid in shared:  # a region that may still be running: memory that the program writes waits for it
            execution.launch.reading.setdefault(b.cdata)
        run.assigned.append((b, vid, b.previous, b.origin))
        b.array = as_array(execution.values[vid], execution.device)
        b.stream = b.previous = None
        b.origin, b.maker = (run.serial, vid), run.thread
    executables = execution.ready.executables
    taken = sum([e.needs for e in executables if e is not None])
    if None in executables:
        taken += sum([nbytes_of(b.home) for b, _ in pairs if b.home is not None])
    execution.device.table.ran([b.cdata for b, _ in pairs], taken)
    if run.flags or DEFERRED.runs:
        DEFERRED.runs.append(run)


def _keep_what_is_there(execution: Execution, error: Exception) -> None:
    """After a failure: bind what was computed, mark the rest as lost."""
    done = [(b, vid) for b, vid in execution.assigned if vid in execution.values]
    _assign(execution, done)
    for b, vid in execution.assigned:
        if vid not in execution.values:
            undo(b, b.previous, b.origin, error)


def compute(b: Buffer, reason: Reason) -> None:
    """Have a buffer's value computed, or under way, and what came before it checked. The caller holds the lock.

    Raises:
        LostValue: an op that it depends on has failed.
        IndexError, ...: a check of something that was run before failed.
    """
    if isinstance(b.stream, Stream):
        flush(b.stream, reason)
    if b.error is None or DEFERRED.owed:
        check()
    if b.error is not None:
        raise lost(b)


def peek(b: Buffer, reason: Reason) -> torch.Tensor:
    """A buffer's finished value as a tensor in home form, without giving its memory back to the storage.

    Waits for this value alone, not for what else is under way. Raises as `materialize` does.
    """
    began = emit.begin()
    with LOCK:
        compute(b, reason)
        assert b.home is not None
        value = alias(b.storage, 0, b.home) if b.is_at_home else to_tensor(b.array)
    emit.synced(reason, began)
    return value


# The first line: what other modules know from here of `deferred_checks`.
__all__ = [
    *("DEFERRED", "check", "lost", "wait"),
    *("compute", "flush", "flush_first", "peek", "run_ahead", "run_alone", "values_needed", "withdraw"),
]
