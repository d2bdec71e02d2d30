"""The event log: what every stage of the pipeline tells, once. Reports are views of it.

`docs/event_log.md` lists the kinds and their fields; `compiling.emit` makes most of them.
"""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OWED = 64  # events whose data nobody has asked for yet: what they are found out from is kept
FRESH = 256  # events of one kind that are added up at a time
KEPT = 10_000  # events of one kind that are kept in memory: a long run's flushes must not push out its compilations


class Event(NamedTuple):
    """One thing that happened. `time` is in seconds of `time.perf_counter`; `data` holds plain values only.

    `thread` counts the threads that have told something, in the order of their first word.
    """

    kind: str
    time: float
    data: dict[str, Any]
    thread: int = 0


@dataclass(slots=True)
class _Told:
    """What has been told of one kind: the last events, and what outlives them."""

    events: collections.deque[Event]
    first: float  # when it was told first
    fresh: list[Event] = field(default_factory=list)  # those that are not in what follows yet
    _count: int = 0
    _reasons: dict[str, int] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many there have been."""
        return self._count + len(self.fresh)

    @property
    def reasons(self) -> dict[str, int]:
        """How many for each reason."""
        self.add_up()
        return self._reasons

    @property
    def sums(self) -> dict[str, float]:
        """The sum of each of their numbers."""
        self.add_up()
        return self._sums

    def add_up(self) -> None:
        """Count the fresh ones in. Not each as it comes: many at once take a fraction of the time."""
        sums, reasons = self._sums, self._reasons
        for event in self.fresh:
            for name, value in event.data.items():
                if type(value) is float or type(value) is int:
                    sums[name] = sums.get(name, 0) + value
                elif name == "reason":
                    reasons[value] = reasons.get(value, 0) + 1
        self._count += len(self.fresh)
        self.fresh.clear()


class _Threads(threading.local):
    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


_thread = _Threads()


@dataclass
class EventLog:
    """The last events of each kind, counts and sums that survive them, and the sinks that want each as it happens.

    `detailed` asks the stages for what costs time to find out: the modules and forward lines of ops, time per region.
    `asked` says that a report will be printed of it, and `budgets` how many are open, for which nothing may go
    unrecorded.
    """

    kept: int = KEPT
    kinds: dict[str, _Told] = field(default_factory=dict)
    counters: collections.Counter[str] = field(default_factory=collections.Counter)
    sinks: list[Callable[[Event], None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    detailed: bool = False
    asked: bool = False
    budgets: int = 0
    owed: collections.deque[Callable[[], Event]] = field(default_factory=collections.deque)
    paying: threading.RLock = field(default_factory=threading.RLock)
    volume: object = field(default_factory=object)  # another one once it has been cleared

    @property
    def is_wanted(self) -> bool:
        """Whether somebody is known to want to read it."""
        return self.asked or bool(self.sinks)

    def emit(self, kind: str, **data: Any) -> None:
        """Append an event and count it."""
        event = Event(kind, time.perf_counter(), data, _thread.number)
        self._keep(event)
        for sink in tuple(self.sinks):  # a copy: another thread may take one away meanwhile
            sink(event)

    def emit_when_read(self, kind: str, find_out: Callable[[], dict[str, Any]]) -> None:
        """Append an event whose data take a while to find out: at once where a sink wants them, else when the log is
        read."""
        if self.sinks:
            self._pay()
            self.emit(kind, **find_out())
            return
        at, thread = time.perf_counter(), _thread.number
        self.owed.append(lambda: Event(kind, at, find_out(), thread))
        if len(self.owed) > OWED:
            self._pay(1)

    def _pay(self, most: int | None = None) -> None:
        """Find out what is owed, the oldest first."""
        with self.paying:
            for _ in range(len(self.owed) if most is None else most):
                if self.owed:  # else the log has been cleared meanwhile
                    self._keep(self.owed.popleft()())

    def _keep(self, event: Event) -> None:
        with self.lock:
            told = self.kinds.get(event.kind)
            if told is None:
                told = self.kinds[event.kind] = _Told(collections.deque(maxlen=self.kept), event.time)
            told.events.append(event)
            told.fresh.append(event)
            if len(told.fresh) >= FRESH:
                told.add_up()

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter without keeping an event: for what happens once per op."""
        self.counters[what] += by

    @property
    def counts(self) -> collections.Counter[str]:
        """How often each kind was told, "kind for reason", and what `count` has counted."""
        self._pay()
        with self.lock:
            out = self.counters.copy()
            for kind, told in self.kinds.items():
                out[kind] += told.count
                for reason, n in told.reasons.items():
                    out[f"{kind} for {reason}"] += n
            return out

    @property
    def totals(self) -> collections.Counter[str]:
        """The sums of the events' numbers, as "kind name"."""
        self._pay()
        with self.lock:
            return collections.Counter(
                {f"{kind} {name}": n for kind, told in self.kinds.items() for name, n in told.sums.items()}
            )

    @property
    def events(self) -> list[Event]:
        """Everything that is still kept, in the order in which it happened."""
        self._pay()
        return self.of(*self.kinds)

    def of(self, *kinds: str) -> list[Event]:
        """The events of the given kinds that are still kept, in the order in which they happened."""
        self._pay()
        with self.lock:
            found = [e for kind in kinds if kind in self.kinds for e in self.kinds[kind].events]
        return found if len(kinds) == 1 else sorted(found, key=lambda e: e.time)

    @property
    def began(self) -> float:
        """The time of the first event, whether it is still kept or not; 0 before there is one."""
        with self.lock:
            return min((told.first for told in self.kinds.values()), default=0.0)

    def forgotten(self) -> dict[str, dict[str, float]]:
        """Of the kinds that have been told more often than is kept: how many events are gone ("count"), and the sums
        of their numbers."""
        self._pay()
        found = {}
        with self.lock:
            for kind, told in self.kinds.items():
                gone = told.count - len(told.events)
                if gone:
                    numbers = {k: n - sum(e.data.get(k, 0) for e in told.events) for k, n in told.sums.items()}
                    found[kind] = {"count": gone, **numbers}
        return found

    def clear(self) -> None:
        """Forget everything: the next report starts here."""
        self.volume = object()
        self.owed.clear()
        with self.lock:
            self.kinds.clear()
            self.counters.clear()


LOG = EventLog()


def _in_child() -> None:
    # The thread that compiles in the background may have been telling something; it is not there to let go.
    LOG.lock, LOG.paying = threading.Lock(), threading.RLock()


os.register_at_fork(after_in_child=_in_child)
