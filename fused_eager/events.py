"""The event log: what every stage of the pipeline tells, once. Reports are views of it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `time` is in seconds of `time.perf_counter`; `data` holds plain values only."""

    kind: str
    time: float
    data: dict[str, Any]


@dataclass
class EventLog:
    """A bounded list of events, sums that survive them, and the sinks that want each event as it happens.

    `counts` has each kind, and "kind for reason"; `totals` sums the numbers of the events, as "kind name".
    """

    events: collections.deque[Event] = field(default_factory=lambda: collections.deque(maxlen=20_000))
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    totals: collections.Counter[str] = field(default_factory=collections.Counter)
    sinks: list[Callable[[Event], None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def emit(self, kind: str, **data: Any) -> None:
        """Append an event and count it."""
        event = Event(kind, time.perf_counter(), data)
        with self.lock:
            self.events.append(event)
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

    def of(self, *kinds: str) -> list[Event]:
        """The events of the given kinds that are still kept."""
        with self.lock:
            return [e for e in self.events if e.kind in kinds]

    def clear(self) -> None:
        """Forget everything: the next report starts here."""
        with self.lock:
            self.events.clear()
            self.counts.clear()
            self.totals.clear()


LOG = EventLog()
