"""The event log: what every stage of the pipeline tells, once. Reports are views of it.

`docs/event_log.md` lists the kinds and their fields; `telling` makes most of them.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KEPT = 10_000  # events of one kind that are kept in memory: a long run's flushes must not push out its compilations


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `time` is in seconds of `time.perf_counter`; `data` holds plain values only.

    `thread` counts the threads that have told something, in the order of their first word.
    """

    kind: str
    time: float
    data: dict[str, Any]
    thread: int = 0


class _Threads(threading.local):
    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


_thread = _Threads()


@dataclass
class EventLog:
    """The last events of each kind, sums that survive them, and the sinks that want each event as it happens.

    `counts` has each kind, and "kind for reason"; `totals` sums the numbers of the events, as "kind name".
    `detailed` asks the stages for what costs time to find out: the modules and forward lines of ops, time per region.
    """

    kept: int = KEPT
    kinds: dict[str, collections.deque[Event]] = field(default_factory=dict)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    totals: collections.Counter[str] = field(default_factory=collections.Counter)
    sinks: list[Callable[[Event], None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    detailed: bool = False

    def emit(self, kind: str, **data: Any) -> None:
        """Append an event and count it."""
        event = Event(kind, time.perf_counter(), data, _thread.number)
        with self.lock:
            events = self.kinds.get(kind)
            if events is None:
                events = self.kinds[kind] = collections.deque(maxlen=self.kept)
            events.append(event)
            self.counts[kind] += 1
            for name, value in data.items():
                if name == "reason":
                    self.counts[f"{kind} for {value}"] += 1
                elif type(value) in (int, float):
                    self.totals[f"{kind} {name}"] += value
        for sink in self.sinks:
            sink(event)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter without keeping an event: for what happens once per op."""
        self.counts[what] += by

    @property
    def events(self) -> list[Event]:
        """Everything that is still kept, in the order in which it happened."""
        return self.of(*self.kinds)

    def of(self, *kinds: str) -> list[Event]:
        """The events of the given kinds that are still kept, in the order in which they happened."""
        with self.lock:
            found = [e for kind in kinds for e in self.kinds.get(kind, ())]
        return found if len(kinds) == 1 else sorted(found, key=lambda e: e.time)

    def clear(self) -> None:
        """Forget everything: the next report starts here."""
        with self.lock:
            self.kinds.clear()
            self.counts.clear()
            self.totals.clear()


LOG = EventLog()
