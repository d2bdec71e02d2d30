"""Materializing: CPU tensors get their values back into their memory, for whoever reads that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiling import emit
from ..devices.buffer import LOCK, Buffer, sweep
from ..devices.host.device import HOST
from ..log.reasons import Reason
from ..policy.allowance import ALLOWANCE
from ..quiet import unobserved
from ..tracing.stream import STREAMS, NativeInput, Stream
from .deferred_checks import DEFERRED, check, lost, wait
from .run import flush, values_needed

TABLE = HOST.table


def materialize(b: Buffer, reason: Reason) -> None:
    """Make a buffer's storage native: its value computed, checked, and in its memory.

    Raises:
        LostValue: an op that it depends on has failed.
        IndexError, ...: a check of something that was run before failed.
    """
    began = emit.begin()
    _materialize(b, reason)
    emit.synced(reason, began)


def _materialize(b: Buffer, reason: Reason) -> None:
    # From here to the end nobody may record: what is flushed could be pending again, or another thread have settled it.
    with LOCK:
        if b.table.get(b.cdata) is not b:
            return
        if isinstance(b.stream, Stream):
            flush(b.stream, reason)
        for stream in STREAMS:
            # Pending reads of this value hold the memory that is about to be opened for writing.
            if b.cdata in stream.reads or (stream.inputs and _reads_memory(stream, b.cdata)):
                flush(stream, reason)
        if (b.error is None and b.array is not None) or DEFERRED.owed:
            check()
        if b.error is not None:
            raise lost(b)
        if b.is_at_home:
            b.table.pop(b.cdata, None)
            return
        with unobserved():
            if DEFERRED.is_reading(b.cdata):
                wait()
            b.bind()


def _reads_memory(stream: Stream, cdata: int) -> bool:
    """Whether pending ops of a stream are to read native memory that another stream's value is about to go to."""
    return any(isinstance(i, NativeInput) and i.storage._cdata == cdata for i in stream.inputs)


def materialize_all(reason: Reason, only: Stream | None = None, made: bool = False) -> None:
    """Bind every buffer that lives, of all streams or without those pending in others than `only`; with `made`, only
    what the ops of that one's thread have made.

    Raises:
        Exception: the first failure, after everything else has been bound. A lost buffer stays lost.
    """
    if not TABLE and DEFERRED.is_empty:
        return
    sweep(TABLE)  # what is dead is nothing to wait for
    began = emit.begin()
    with LOCK:
        busy = any(b.error is None and (b.stream is None or only in (None, b.stream)) for b in TABLE.values())
        pending = {id(b.stream): b.stream for b in TABLE.values() if isinstance(b.stream, Stream)}
    errors: list[Exception] = []

    def attempt(step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            errors.append(error)

    for stream in pending.values():
        if only in (None, stream):
            attempt(flush, stream, reason)
    sweep(TABLE)
    attempt(check)
    with LOCK:
        computed = [b for b in TABLE.values() if b.error is None and b.stream is None]
    if only is not None and made:
        computed = [b for b in computed if b.maker == only.thread]
    for b in computed:
        attempt(_materialize, b, reason)
    if not made:
        wait()
    if busy:
        emit.synced(reason, began)
    if errors:
        raise errors[0]


def take_over() -> None:
    """What ATen ran alone is recorded again: what it has left goes back before regions take memory of their own."""
    with LOCK:
        HOST.housekeeping.turn()


def hand_over(reason: Reason, only: Stream | None = None) -> None:
    """ATen goes on alone: bind everything, as `materialize_all` does, and keep no memory for regions to come."""
    recorded = bool(TABLE)  # since it was last handed over
    materialize_all(reason, only)
    with LOCK:
        HOST.housekeeping.forget()
        if recorded:
            HOST.housekeeping.turn()


def give_up(stream: Stream) -> None:
    """End a shadowed stream in the middle: nothing is planned for it, and its results are at home."""
    with LOCK, unobserved():
        assert stream.first is not None and stream.shadowed is not None
        ALLOWANCE.give_up(stream.first, stream.shadowed, len(stream.nodes), stream.policy.backoff)
        _, _, assigned = values_needed(stream)
        for b, _ in assigned:
            b.stream, b.maker = None, stream.thread
        stream.reset()
    materialize_all(Reason("region.new"), only=stream)
