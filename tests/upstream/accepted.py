"""Differences from plain PyTorch that are accepted, each with its reason.

A row names tests by a pattern (`fnmatch`) of `file::class::test` and the modes it holds in. Rows are for what a test
knows of PyTorch's insides: how often the dispatcher is called, which private object is where. A wrong number, a
missing error or a crash is never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tests that may differ, in which modes (all, if none is named), and why."""

    tests: str
    why: str
    modes: tuple[str, ...] = ()

    def covers(self, test: str, mode: str) -> bool:
        """Whether this row is about a test in a mode."""
        return (not self.modes or mode in self.modes) and fnmatchcase(test, self.tests)


ACCEPTED: tuple[Accepted, ...] = ()


def reason_for(test: str, mode: str) -> str | None:
    """Why a test may differ in a mode; None if it may not."""
    return next((row.why for row in ACCEPTED if row.covers(test, mode)), None)
