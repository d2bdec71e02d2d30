"""Queues of a device: `Stream` and `Event`, as `torch.cuda` has them. A device has one queue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from ...devices.arrivals import EXPECTED
from ...devices.buffer import LOCK
from ...executing import run
from ...log.reasons import Reason
from .doors import CURRENT, DOORS, existing

SYNC = Reason("sync.call", "synchronize")


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


class Stream(torch.Stream):
    """The device's queue: a device has one, so that whatever is asked of it happens in order."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        made: Any = super().__new__(cls, stream_id=0, device_index=index_of(device), device_type=_KIND)
        return made  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait until all that was asked of it is done."""
        DOORS[self.device_index].finish(SYNC)

    def query(self) -> bool:
        """Whether all that was asked of it is done."""
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
        return isinstance(other, Stream) and other.device_index == self.device_index

    def __hash__(self) -> int:
        return hash(("stream", self.device_index))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


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
    """The queue of a device."""
    return Stream(device)


def default_stream(device: Any = None) -> Stream:
    """The queue of a device."""
    return Stream(device)


def set_stream(stream: Stream) -> None:
    """Nothing: a device has one queue."""


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """The body's ops go to `stream`: a device has one queue."""
    yield
