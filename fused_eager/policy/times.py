"""What segments took: the values that a choice is made from."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

SAMPLES = 4  # segments of each way that are timed; the first of them pays for the change and does not count
MOST = 4 * SAMPLES  # and no more, where they end here and there, or do not tell the ways apart
SPIKE = 3.0  # what takes so many times the median waited for something else than the program's own work
CLEAR = 2.0  # standard deviations that tell one thing from another
ROUGH = 0.3  # standard error of a single segment, as a part of it: it may be a spike
FACTOR, SURPRISES = 2.0, 3  # so far from what was measured, so many times in a row: what was measured is something else
RESOLUTION = 1e-9  # seconds: what a clock does not tell from nothing
BLINK = 1e-3  # seconds: what is shorter may take twice as long at any time
WEIGHT, FARTHEST = 0.25, 0.25  # of the last two blocks in the noise; and what they may add to it at most

Place = Hashable


@dataclass
class Steady:
    """Whether times stay about what they were."""

    expected: float = 0.0  # 0: the first one says
    surprises: int = 0

    def holds(self, seconds: float, noise: float = 0.0) -> bool:
        """Take one more time; False when it has become clear that they are others now, where the machine alone moves
        them by `noise` (a logarithm's standard deviation)."""
        if not self.expected:
            self.expected = seconds
        took, expected, factor = max(seconds, BLINK), max(self.expected, BLINK), FACTOR * math.exp(CLEAR * noise)
        off = took > factor * expected or factor * took < expected
        self.surprises = self.surprises + 1 if off else 0
        return self.surprises < SURPRISES


@dataclass
class Noise:
    """How far the machine alone moves what segments take from one block of them to the next: the Allan variance of
    its logarithm (D. W. Allan, 1966). Neighbouring blocks are what a look compares."""

    variance: float = 0.0
    block: list[float] = field(default_factory=list)  # the one that is not full yet
    last_s: float = 0.0  # a segment of the one before it; 0: there was none

    def add(self, seconds: float) -> float:
        """One more segment. Returns what one of its block took, where that is full; else 0."""
        self.block.append(seconds)
        if len(self.block) < SAMPLES:
            return 0.0
        before, self.last_s, self.block = self.last_s, statistics.median(self.block), []
        if before:
            self.variance += WEIGHT * (min(math.log(self.last_s / before) ** 2, FARTHEST) - self.variance)
        return self.last_s

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    def interrupt(self) -> None:
        """What comes next is no neighbour of what came last."""
        self.block, self.last_s = [], 0.0


def usual(found: Sequence[float], middle: bool = False) -> tuple[float, float]:
    """What one takes on average but for spikes, or in the `middle`, in seconds, and the standard error as a part of
    it; 0 and infinity if there is none."""
    if not found:
        return 0.0, math.inf
    median = statistics.median(found)
    own = [seconds for seconds in found if seconds <= SPIKE * median]
    mean = statistics.fmean(own)
    error = statistics.stdev(own) / mean / math.sqrt(len(own)) if len(own) > 1 else ROUGH
    return (median if middle else mean), error


class Times:
    """What segments took that began alike and ran the same way, by where they ended: a loop that reads its loss every
    tenth step has segments of a step, and short ones from the last step to the read.

    The first one pays for the change of ways and does not count.
    """

    def __init__(self) -> None:
        self.by_end: dict[Place, deque[float]] = {}  # the last `MOST` of each
        self.count = 0

    def add(self, end: Place, seconds: float) -> None:
        """One more."""
        if self.count:
            self.by_end.setdefault(end, deque(maxlen=MOST)).append(max(seconds, RESOLUTION))
        self.count += 1

    def of(self, end: Place) -> Sequence[float]:
        """Those that ended there."""
        return self.by_end.get(end, ())

    def usual_end(self) -> Place:
        """Where most of them ended."""
        return max(self.by_end, key=lambda end: len(self.by_end[end]), default=None)

    def amend(self, end: Place, seconds: float) -> None:
        """The last one has taken so much more."""
        if self.by_end.get(end):
            self.by_end[end][-1] += seconds

    def suffice(self, end: Place, samples: int) -> bool:
        """Whether there are so many of those that ended there, or it has become clear that there will not be."""
        return len(self.of(end)) >= samples - 1 or self.count >= MOST

    def copy(self) -> Times:
        """The same, which go on alone."""
        other = Times()
        other.by_end = {end: times.copy() for end, times in self.by_end.items()}
        other.count = self.count
        return other

    def keep(self, end: Place, samples: int) -> None:
        """As if the last ones that ended there, and the one before them, were all that have been timed."""
        last = list(self.of(end))[1 - samples :]
        self.clear()
        for seconds in (*last[:1], *last):
            self.add(end, seconds)

    def clear(self) -> None:
        """Begin again."""
        self.by_end.clear()
        self.count = 0
