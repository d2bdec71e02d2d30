"""Rows: what an event log is added up to, one class per table. Times are seconds, as in `facts`."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cut:
    """All flushes of one reason at one line."""

    reason: str
    detail: str
    site: str
    count: int = 0
    ops: int = 0
    seconds: float = 0.0
    plans: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class Sync:
    """All waits of one reason at one line. `waited` leaves out compiling and launching on the way; `longest` too.

    `rounds` counts those with work launched since the one before: reading ten values after a loop is one round.
    """

    reason: str
    detail: str
    site: str
    count: int = 0
    waited: float = 0.0
    longest: float = 0.0
    rounds: int = 0
    seen: int = -1  # flushes at the last wait


@dataclass
class Collective:
    """All collectives of one op at one line in one group: how many, their bytes, the seconds from start to end, those
    before it for what it reads, and those that the program stood still for it; `watched` are the seconds of those
    collectives of which that is known."""

    op: str
    site: str
    group: str
    ranks: int
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    fetch_s: float = 0.0
    wait_s: float = 0.0
    watched_s: float = 0.0
    sizes: set[int] = field(default_factory=set)  # some of the bytes that one has had

    @property
    def overlap(self) -> float | None:
        """The part of its time in which the program went on; None where that is not known."""
        return max(0.0, 1 - self.wait_s / self.watched_s) if self.watched_s else None

    @property
    def rate(self) -> float:
        """Bytes in a second, from the start of each to its end: a rank that comes late makes it smaller."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass
class Met:
    """One collective as the ranks have told of it: for how long each process was in it, by its number."""

    site: str
    ranks: int
    waits: dict[int, float] = field(default_factory=dict)

    @property
    def skew(self) -> float | None:
        """The seconds by which its last rank came later than its first; None where not all have told of it."""
        return max(self.waits.values()) - min(self.waits.values()) if len(self.waits) == self.ranks > 1 else None


@dataclass
class Compile:
    """One compilation. `code` is the number of what it made, as plans name it; `runs` counts how often that has run."""

    region: str
    site: str
    module: str
    ops: int
    seconds: float
    cause: str
    why: str
    changes: list[list[Any]]
    skeleton: tuple[int, int]
    variant: int
    time: float
    process: int
    code: tuple[int, int] | None = None
    runs: int = 0
    waited: bool = True


@dataclass
class Region:
    """One region of a plan. `alone` are the sampled seconds of one run with nothing else under way; None: no sample."""

    plan: tuple[int, int]
    index: int
    how: str
    ops: int
    ended_by: str
    detail: str
    site: str
    lines: list[tuple[str, str, bool, dict[str, int]]]
    data: dict[str, Any]
    count: int = 0
    samples: list[float] = field(default_factory=list)

    @property
    def alone(self) -> float | None:
        """The median of the samples."""
        ordered = sorted(self.samples)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def total(self) -> float | None:
        """`alone` for every time it ran."""
        return None if self.alone is None else self.alone * self.count

    @property
    def name(self) -> str:
        """The region in words: how many ops, from which lines."""
        lines = [line for line, *_ in self.lines]
        first, last = (lines[0], lines[-1]) if lines else ("?", "?")
        return f"{self.ops} ops from {first}" + (f" to {last}" if first != last else "")


@dataclass
class Line:
    """One line of the program. `device` is its share of the regions' sampled time, by number of ops."""

    site: str
    modules: set[str] = field(default_factory=set)
    ops: collections.Counter[str] = field(default_factory=collections.Counter)
    backward: int = 0
    regions: list[tuple[int, int, int]] = field(default_factory=list)
    device: float = 0.0


@dataclass
class Island:
    """An op that runs natively at a line."""

    op: str
    reason: str
    site: str
    count: int = 0
    seconds: float = 0.0


@dataclass
class Built:
    """A line that made modules inside a context. `count` is how often its first parameter was made."""

    site: str
    module: str
    count: int = 0
    seconds: float = 0.0
    late: int = 0  # of them, after the first flush
    last: float = 0.0
    key: tuple[str, str] = ("", "")
