"""A rank that is lost: what is known of it, and the error that the others raise."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from ..errors import FusedEagerError

HELP = "docs/how_to/a_rank_died.md"


class RankLost(FusedEagerError):
    """Another rank of the job has been killed, has stopped, has raised, or has ended, and a collective waits for it.

    The process groups of this process have been aborted: every further collective raises this, too. `rank` is the
    rank that is lost, `line` the last one of the program that it was seen at; both are None where nobody knows.
    """

    rank: int | None = None
    line: str | None = None


class CollectivesDiffer(FusedEagerError):
    """The ranks of a group have called different collectives; the text names both, and their lines."""


ADVICE = {
    "gone": "Look at what it wrote last. A process that is killed without a word is most often killed by the system "
    "for the memory it takes (`dmesg` says so), or by the scheduler",
    "silent": "It was stopped (SIGSTOP, a debugger), its machine hangs or has no network, or C code of it has held the "
    "interpreter. A longer time is FUSED_EAGER_HEARTBEAT=60, none is 0",
    "raised": "The error to look at is the one on that rank",
    "ended": "It called fewer collectives than this rank: look for a loop whose length differs between ranks "
    "(torch.distributed.algorithms.Join is for that), or for an early return or exit",
    "store": "Look at what it wrote last, and whether its machine can be reached",
    "missing": "Start it, or look why it has not come so far; a longer time is FUSED_EAGER_ARRIVAL=600",
    "differ": "Every rank has to call the same collectives of a group in the same order: look for a collective in a "
    "branch that only some ranks take",
}

END = (
    "The process groups of this process have been aborted: let it end, with an exit code other than 0, and start all "
    "ranks again from the last checkpoint (torchrun --max-restarts does)"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What has happened to which rank. `kind` is a key of `ADVICE`, `text` goes on after the rank's name."""

    kind: str
    rank: int | None
    text: str
    line: str = ""

    def dump(self) -> str:
        """As it goes through the store."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def parse(text: str) -> Fault:
        """What `dump` has made."""
        return Fault(**json.loads(text))

    def short(self) -> str:
        """One line of it."""
        who = "" if self.rank is None else f"rank {self.rank} "
        return who + self.text + (f"; its last line: {self.line}" if self.line else "")

    def error(self, own: int, where: str, end: str = END) -> FusedEagerError:
        """The error that rank `own` raises, which is at `where`. `end`: what becomes of its process."""
        kind: type[FusedEagerError] = CollectivesDiffer if self.kind == "differ" else RankLost
        waits = f"Rank {own} {where}. " if where else ""
        error = kind(f"{self.short()}. {waits}{ADVICE[self.kind]}. {end}. See {HELP}")
        if isinstance(error, RankLost):
            error.rank, error.line = self.rank, self.line or None
        return error
