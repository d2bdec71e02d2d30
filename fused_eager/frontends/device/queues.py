"""Queues of a device: `Stream` and `Event`, as `torch.cuda` has them.

A device computes in the order of the program, whatever stream an op is in: that order is one that every program allows.
A stream of the program's own says that its copies are beside what the others compute, so that begins before the copy.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from ...devices.arrivals import EXPECTED
from ...devices.buffer import LOCK
from ...executing import run
from ...log.reasons import Reason
from .doors import CURRENT, DOORS, Door, existing, meaning

SYNC = Reason("sync.call", "synchronize")
COPY = Reason("cut.copy")


def index_of(device: Any = None) -> int:
    """The number of a device given as one, by name, or not at all."""
    if device is None:
        return CURRENT[0]
    if isinstance(device, int):
        index = device
    else:
        named = torch.device(device)
        if named.type != torch._C._get_privateuse1_backend_name():
            raise ValueError(f"expected a {torch._C._get_privateuse1_backend_name()} device, but got {device!r}")
        index = CURRENT[0] if named.index is None else named.index
    return existing(index)


_PRIVATEUSE1: Any = torch._C._autograd.DeviceType.PrivateUse1
_KIND = int(_PRIVATEUSE1)


_NUMBERS = itertools.count(1)


class Stream(torch.Stream):
    """A queue of a device's: a new one, or the one of a number, of which 0 is the default."""

    def __new__(
        cls,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = _KIND,
    ) -> Stream:
        number = next(_NUMBERS) if stream_id is None else stream_id
        index = index_of(device if device_index is None else device_index)
        made: Any = super().__new__(cls, stream_id=number, device_index=index, device_type=_KIND)
        return made  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait until all that was asked of the device is done."""
        DOORS[self.device_index].finish(SYNC)

    def query(self) -> bool:
        """Whether all that was asked of the device is done."""
        door = DOORS[self.device_index]
        with LOCK:
            arrays = [b.array for b in door.device.table.values() if b.array is not None]
            return not (EXPECTED or door.stream.nodes) and all(a.is_ready() for a in arrays)

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Nothing that is asked from here on happens before what was asked of `stream`: of another device it waits."""
        if stream.device_index != self.device_index:
            stream.synchronize()

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """Nothing that is asked from here on happens before the event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """An event that has happened when all that was asked so far is done."""
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and _named(other) == _named(self)

    def __hash__(self) -> int:
        return hash(_named(self))

    def __enter__(self) -> Stream:
        _THREAD.entered.append(enter := stream(self))
        enter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _THREAD.entered.pop().__exit__(*error)


def _named(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


class _Thread(threading.local):
    """What a thread has chosen: its stream of each device, by number, and the streams that it is in."""

    def __init__(self) -> None:
        self.current: dict[int, Stream] = {}
        self.entered: list[Any] = []


_THREAD = _Thread()


def begin_before_a_copy(door: Door) -> None:
    """A tensor is about to be copied to a device: what it has been asked for begins to run first, if the program copies
    in a stream of its own, so that both go on at a time."""
    chosen = _THREAD.current.get(door.device.index)
    if chosen is not None and chosen.stream_id and door.stream.nodes and door.stream.config.mode == "fused":
        with LOCK:
            run.flush(door.stream, COPY)


class Event:
    """A point in a device's queue. `enable_timing`: with its time.

    An event without one cuts no region: what is pending as it is recorded begins to run when the event is asked for.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.enable_timing = enable_timing
        self._waits: list[Any] | None = None  # until these arrays are there; None before it is recorded
        self._pending = -1  # the epoch of the device's stream in which it was recorded, until somebody asks
        self._time: float | None = None
        self._stamped: threading.Thread | None = None
        self._index = 0

    def record(self, stream: Stream | None = None) -> None:
        """The event happens when all that was asked so far is done."""
        self._index = CURRENT[0] if stream is None else stream.device_index
        self._time = self._stamped = None
        self._waits, self._pending = [], DOORS[self._index].stream.epoch
        if not self.enable_timing:
            return
        if not self.query():
            self._stamped = threading.Thread(target=_stamp, args=(self, self._waits), name="event", daemon=True)
            self._stamped.start()
        else:
            self._time = time.perf_counter()

    def _begin(self) -> list[Any]:
        """Have run what the event waits for, and return until which arrays are there."""
        if self._pending < 0:
            return self._waits or []
        door = DOORS[self._index]
        with LOCK:
            if door.stream.epoch == self._pending:
                run.flush(door.stream, SYNC)
            arrays = [b.array for b in door.device.table.values() if b.array is not None]
            # What was computed may be overwritten soon, and is gone then: its run has ended all the same.
            self._waits = [*(t for launch in run.DEFERRED.launches for t in launch.tokens), *arrays]
            self._pending = -1
        return self._waits

    def query(self) -> bool:
        """Whether it has happened."""
        return all(a.is_deleted() or a.is_ready() for a in self._begin())

    def synchronize(self) -> None:
        """Wait until it has happened."""
        _wait_for(self._begin())
        if self._stamped is not None:
            self._stamped.join()
        if self._waits:
            self._waits = []

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing that is asked of `stream` from here on happens before the event."""
        if (CURRENT[0] if stream is None else stream.device_index) != self._index:
            self.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to another.

        Raises:
            RuntimeError: one of them has no time, was not recorded, or has not happened yet.
        """
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        if self._waits is None or end._waits is None:
            raise RuntimeError("both events must be recorded before the time between them is asked for")
        for event in (self, end):
            if not event.query():
                raise RuntimeError("both events must have happened before the time between them is asked for")
            event.synchronize()
        assert self._time is not None and end._time is not None
        return (end._time - self._time) * 1e3


def _wait_for(arrays: list[Any]) -> None:
    for a in arrays:
        # It has been overwritten, or computing it has failed, which is told to whoever reads it.
        with contextlib.suppress(RuntimeError):
            a.block_until_ready()


def _stamp(event: Event, waits: list[Any]) -> None:
    """Note when an event has happened, unless it is recorded again meanwhile."""
    with contextlib.suppress(Exception):  # what has failed is told to whoever reads it
        _wait_for(waits)
    if event._waits is waits or not event._waits:
        event._time = time.perf_counter()


def current_stream(device: Any = None) -> Stream:
    """The stream of a device that this thread has chosen."""
    index = index_of(device)
    return _THREAD.current.get(index) or Stream(index, stream_id=0)


def default_stream(device: Any = None) -> Stream:
    """The stream of a device where none is chosen."""
    return Stream(device, stream_id=0)


def set_stream(stream: Stream) -> None:
    """Choose a stream of this thread's, and mean its device where none is named."""
    CURRENT[0] = existing(stream.device_index)
    _THREAD.current[stream.device_index] = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """The body's ops go to `stream`, and its device is meant where none is named; None: as before."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device_index)
    with meaning(existing(stream.device_index)):
        _THREAD.current[stream.device_index] = stream
        try:
            yield
        finally:
            _THREAD.current[stream.device_index] = before
