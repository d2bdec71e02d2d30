"""Reading: event logs from files, of one process or of many, into one list per process."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import FusedEagerError
from ..log.events import Event
from .schema import FORMER, VERSION


class LogError(FusedEagerError):
    """A file is no event log, or one of a version that this reader does not know."""


@dataclass
class Process:
    """The events of one process, in the order in which they happened; times are seconds since its start.

    `start` has the fields of the `start` line, `ended` whether the process ended in order, `broken` how many lines
    could not be read (a killed process may leave one). `forgotten` has the sums of what a log in memory no longer holds
    (`EventLog.forgotten`).
    """

    start: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    file: str = ""
    ended: bool = False
    broken: int = 0
    forgotten: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What to call it: its rank, or its number."""
        rank = self.start.get("rank")
        return f"rank {rank}" if rank is not None else f"process {self.start.get('pid', '?')}"

    @property
    def wall(self) -> float:
        """Unix time at which its clock was zero; 0.0 if unknown."""
        return float(self.start.get("wall", 0.0))

    def add(self, line: str) -> Event | None:
        """Take in one line of the file; returns the event, None for the first line and for what is no event.

        Raises:
            LogError: the line says that the log is of a version that is not known here.
        """
        if not line.strip():
            return None
        try:
            data = json.loads(line)
            kind, t, thread = data.pop("kind"), float(data.pop("t")), int(data.pop("thread", 0))
        except (ValueError, KeyError, AttributeError, TypeError):
            self.broken += 1
            return None
        if kind == "start":
            if data.get("v") not in range(1, VERSION + 1):
                raise LogError(f"{self.file}: version {data.get('v')!r} of the event log; known here: 1 to {VERSION}")
            self.start = data
            return None
        self.ended = kind == "end"
        event = Event(FORMER.get(kind, kind), t, data, thread)
        self.events.append(event)
        return event


def siblings(path: str) -> list[str]:
    """The files of the other processes of the job whose first process wrote `path`."""
    escaped = glob.escape(path)
    return sorted(glob.glob(f"{escaped}.rank*") + glob.glob(f"{escaped}.pid*"))


def read_one(path: str) -> Process:
    """The events of one file.

    Raises:
        LogError: it is no event log.
        OSError: it cannot be read.
    """
    process = Process(file=path)
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            process.add(line)
    if not process.start:
        raise LogError(f"{path}: this is no event log: it does not begin with a line of kind start")
    process.events.sort(key=lambda e: e.time)
    return process


def read(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Process]:
    """The processes of one or more logs. A log brings with it what other processes of the same job wrote beside it.

    Raises:
        LogError: a file is no event log.
        OSError: a file cannot be read.
    """
    given = [os.fspath(p) for p in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    out = [read_one(path) for path in given]
    for process in list(out):
        for path in siblings(process.file):
            if path in given:
                continue
            try:
                other = read_one(path)
            except LogError:
                continue  # a rank that has not written its first line yet
            # What an earlier job left there is not part of this one.
            if other.start.get("job") == process.start.get("job"):
                out.append(other)
    return sorted(out, key=lambda p: (p.start.get("rank") or 0, p.wall))


def from_memory(
    events: Iterable[Event], start: float, forgotten: dict[str, dict[str, float]] | None = None
) -> Process:
    """The events that this process still keeps, and the sums of the others; `start` is the time (`perf_counter`) to
    count from."""
    return Process(
        {"pid": os.getpid()},
        [Event(e.kind, e.time - start, e.data, e.thread) for e in events],
        ended=True,
        forgotten=forgotten or {},
    )
