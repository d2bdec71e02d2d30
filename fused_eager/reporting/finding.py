"""What a finder of advice finds, and how often or long something has to be to count."""

from __future__ import annotations

from dataclasses import dataclass

from .source import text

OFTEN = 0.2  # of the rounds: what happens less often than that is worth a word only for its time
STEADY = 0.6  # of the rounds: what comes as often as that belongs to each of them
NOTABLE = 0.02  # of the run's seconds


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change. `seconds` of this run are what it cost (infinity: the result is wrong); `evidence` says how
    one knows."""

    kind: str
    site: str
    title: str
    cure: str
    seconds: float
    evidence: str

    @property
    def source(self) -> str:
        """The program's line."""
        return text(self.site)
