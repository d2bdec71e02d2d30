"""What a training step would take on more ranks than there are: a prediction, from one rank's run without its peers.

The run says what the rank computes between its collectives, where it starts them, and where it waits for one. The link
says what each takes. Played through once more with that, the rank waits where a result has not come: so what overlaps
is what the program lets overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..targets.links import Link
from .text import amount, duration

WORD = "PREDICTED"
WIDTH = 48  # columns of the plot


@dataclass(frozen=True)
class Sent:
    """A collective of the run: when it was started and when its result was used, in seconds from the run's begin."""

    op: str
    bytes: int
    ranks: int
    start: float
    use: float


@dataclass(frozen=True)
class Rehearsal:
    """One rank's run of some steps as one of `ranks`, whose peers were not there.

    Arguments:
        ends: when each step ended, in seconds from the run's begin; the first one is where the first step begins.
        memory: the most bytes that its values and a region have taken at once.
    """

    ranks: int
    ends: list[float]
    sent: list[Sent]
    memory: int

    @staticmethod
    def parse(found: Mapping[str, Any]) -> Rehearsal:
        """As `asdict` has made it."""
        return Rehearsal(found["ranks"], found["ends"], [Sent(**each) for each in found["sent"]], found["memory"])


@dataclass(frozen=True)
class Predicted:
    """A step on so many ranks, in seconds: all of it, what it computes, what it sends, and how long it stands still."""

    ranks: int
    seconds: float
    compute: float
    sending: float
    waiting: float
    collectives: float
    bytes: float
    memory: int
    predicted: bool = True


def predict(run: Rehearsal, link: Link, compute: float = 1.0) -> Predicted:
    """A step of a run, whose collectives take what a link says. The collectives of a rank come one after the other.

    It is the step that took the least, as what else the host does only adds to one; and not the first of several, as
    that one does not wait for what the one before it has sent.

    Arguments:
        compute: how many times as long as in the run it takes to compute.
    """
    late = free = 0.0  # by how much the rank is behind the run, and when the link is free again
    ready: dict[int, float] = {}
    delays: list[float] = []  # at the end of each step
    marks = [(end, 2, k) for k, end in enumerate(run.ends)]
    marks += [(each.start, 0, k) for k, each in enumerate(run.sent)]
    marks += [(each.use, 1, k) for k, each in enumerate(run.sent)]
    for when, what, k in sorted(marks):
        now = compute * when + late
        if what == 0:
            each = run.sent[k]
            free = ready[k] = max(now, free) + link.seconds(each.op, each.bytes, each.ranks)
        elif what == 1:
            late += max(ready[k] - now, 0.0)
        else:
            delays.append(late)
    first, last = run.ends[0], run.ends[-1]
    steps = len(run.ends) - 1
    inside = [each for each in run.sent if first < each.start <= last]
    counted = range(min(1, steps - 1), steps)
    found = [((run.ends[k + 1] - run.ends[k]) * compute, delays[k + 1] - delays[k]) for k in counted]
    computed, waits = min(found, key=sum)
    return Predicted(
        run.ranks,
        computed + waits,
        computed,
        sum(link.seconds(each.op, each.bytes, each.ranks) for each in inside) / steps,
        waits,
        len(inside) / steps,
        sum(each.bytes for each in inside) / steps,
        run.memory,
    )


@dataclass
class Scaling:
    """All that is told. `divided`: the program's arguments have a number that is divided among the ranks."""

    link: Link
    rows: list[Predicted]
    divided: bool
    compute: float = 1.0
    notes: Sequence[str] = field(default_factory=tuple)

    def efficiency(self, row: Predicted) -> float:
        """Of a rank, against the fewest ranks of the table."""
        base = self.rows[0]
        work = base.ranks / row.ranks if self.divided else 1.0
        return work * base.seconds / row.seconds if row.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """For `json.dump`."""
        rows = [{**asdict(row), "efficiency": self.efficiency(row)} for row in self.rows]
        how = "strong" if self.divided else "weak"
        return {"predicted": True, "scaling": how, "link": asdict(self.link), "compute": self.compute, "rows": rows}

    def as_text(self) -> str:
        """A table and a plot."""
        how = "strong scaling: the work is divided" if self.divided else "weak scaling: each rank has the same work"
        lines = [
            f"{WORD}: one step on more ranks than there are ({how}).",
            f"Links: {self.link.name}, {self.link.alpha * 1e6:.3g} us a message and "
            f"{self.link.bandwidth / 1e9:.3g} GB/s ({self.link.source}).",
            *self.notes,
            "",
            f"{'ranks':>6}{'step':>11}{'computing':>11}{'sending':>11}{'waiting':>11}{'collectives':>13}"
            f"{'sent':>10}{'memory':>10}{'efficiency':>12}",
        ]
        for row in self.rows:
            lines.append(
                f"{row.ranks:>6}{duration(row.seconds):>11}{duration(row.compute):>11}{duration(row.sending):>11}"
                f"{duration(row.waiting):>11}{row.collectives:>13.4g}{amount(int(row.bytes)):>10}"
                f"{amount(row.memory):>10}{self.efficiency(row):>12.0%}  {WORD}"
            )
        lines += ["", f"Step, {WORD} (# computing, + waiting for other ranks):"]
        most = max((row.seconds for row in self.rows), default=0.0) or 1.0
        for row in self.rows:
            bar = "#" * round(WIDTH * row.compute / most)
            bar += "+" * (round(WIDTH * row.seconds / most) - len(bar))
            lines.append(f"{row.ranks:>6} {bar:<{WIDTH}} {duration(row.seconds)}")
        return "\n".join(lines)
