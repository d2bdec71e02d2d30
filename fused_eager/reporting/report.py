"""The report: facts and advice of a run, for programs, notebooks and people."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..log.events import LOG
from . import advice, facts, reading, text
from .advice import Advice
from .facts import Facts
from .reading import Process


@dataclass(frozen=True)
class Report:
    """What a run did. `str()` is one screen of text, with the advice that gains most first.

    `facts` has all rows and sums (times in seconds), `advice` what to change. `processes` are the events themselves.
    """

    facts: Facts
    advice: tuple[Advice, ...]
    processes: tuple[Process, ...]

    @classmethod
    def of(cls, processes: Sequence[Process]) -> Report:
        """The report of the given processes."""
        found = facts.add_up(processes)
        return cls(found, tuple(advice.advise(found)), tuple(processes))

    @classmethod
    def read(cls, *paths: str | os.PathLike[str]) -> Report:
        """The report of one or more files that the option `report` has written.

        Raises:
            LogError: a file is no event log.
            OSError: a file cannot be read.
        """
        return cls.of(reading.read(paths))

    @property
    def ops(self) -> int:
        """Ops that were flushed."""
        return self.facts.ops

    @property
    def regions(self) -> int:
        """How often a region ran."""
        return self.facts.runs

    @property
    def compilations(self) -> int:
        """Regions that were compiled."""
        return len(self.facts.compiles)

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling took."""
        return self.facts.compiling_in_all

    @property
    def flushes(self) -> dict[str, int]:
        """Flushes by reason code."""
        counts: collections.Counter[str] = collections.Counter()
        for cut in self.facts.cuts:
            counts[cut.reason] += cut.count
        return dict(counts)

    @property
    def islands(self) -> dict[str, str]:
        """Ops that ran natively, each with its reason and line."""
        return {i.op: f"{i.reason} ({i.site})" for i in self.facts.islands}

    @property
    def choices(self) -> dict[str, str]:
        """Lines from which the program was timed up to its next read, each with the way that was the faster one."""
        return {site: "native" if c["native"] else "fused" for site, c in self.facts.choices.items()}

    def __str__(self) -> str:
        return text.render(self.facts, self.advice)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .html import fragment  # brings Jinja along

        return fragment(self.facts, self.advice)

    def html(self) -> str:
        """The report as one HTML page that needs nothing else."""
        from .html import page

        return page(self.facts, self.advice)


def report(*, reset: bool = False) -> Report:
    """The report of this process so far. Its rows are of what the event log still holds (the last 10,000 events of each
    kind); times and the number of ops are those of the whole run.

    With `reset`, the next report begins here.
    """
    found = Report.of([reading.from_memory(LOG.events, LOG.began, LOG.forgotten())])
    if reset:
        LOG.clear()
    return found
