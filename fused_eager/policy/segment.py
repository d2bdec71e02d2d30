"""A segment: the ops between two reads of the program, what they took each way, and which way is kept.

A few of them are timed fused, a few natively, and the faster way is kept; now and then the other one gets another
chance, against what the kept one has taken last: a machine is slower at one time than at another. Where a segment
suddenly takes twice as long, or half, it is another one than it was: both ways are measured again.

What was chosen is owed to the compile cache, and what another process chose may be offered by it (`executing.choices`):
it is then taken as if it had been measured here, and given up like that where it turns out to be wrong here.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from ..log.events import LOG
from ..log.site import describe

SAMPLES = 4  # segments of each way that are timed; the first of them pays for the change and does not count
MOST = 4 * SAMPLES  # and no more, where they end here and there
# Fused has to take less than this part of the native time: what the program holds goes to other memory after a context
# is entered, or a `sync()`, and back before the next: a third of a step, for an optimizer.
WORTH = 0.95
CLOSE = 1.5  # the slower way takes at most so many times the faster: a busy moment may have decided
FAR = 4.0  # neither a busy moment nor our mode makes torch so many times slower: it is
# The other way is tried again after the time of so many segments: after a close call, after any other; then doubled
# each time. And not before what it cost to try it is so small a part of the time since.
SOON, AGAIN, LONGEST = 16, 256, 16_384
LOSS = 0.01
FACTOR, SURPRISES = 2.0, 3  # so far from what was measured, so many times in a row: what was measured is something else
BLINK = 1e-3  # seconds: what is shorter may take twice as long at any time
ASKS = 4  # times that a segment's choice is asked for

Place = Hashable
Pieces = tuple[tuple[str, str], ...]  # the regions of a flush: who runs it (xla or aten), the digest of its key
Ran = tuple[Pieces | None, ...]  # the flushes of a segment; None where a region has no key


@dataclass
class Steady:
    """Whether times stay about what they were."""

    expected: float = 0.0  # 0: the first one says
    surprises: int = 0

    def holds(self, seconds: float) -> bool:
        """Take one more time; False when it has become clear that they are others now."""
        if not self.expected:
            self.expected = seconds
        took, expected = max(seconds, BLINK), max(self.expected, BLINK)
        off = took > FACTOR * expected or FACTOR * took < expected
        self.surprises = self.surprises + 1 if off else 0
        return self.surprises < SURPRISES


class Times:
    """What segments took that began alike and ran the same way, by where they ended: a loop that reads its loss every
    tenth step has segments of a step, and short ones from the last step to the read.

    The first one pays for the change of ways and does not count.
    """

    def __init__(self) -> None:
        self.by_end: dict[Place, deque[float]] = {}  # the last `MOST` of each
        self.count = 0
        self.spent = 0.0  # seconds, all of them together

    def add(self, end: Place, seconds: float) -> None:
        """One more."""
        if self.count:
            self.by_end.setdefault(end, deque(maxlen=MOST)).append(seconds)
        self.count += 1
        self.spent += seconds

    def of(self, end: Place) -> Sequence[float]:
        """Those that ended there."""
        return self.by_end.get(end, ())

    def usual(self) -> Place:
        """Where most of them ended."""
        return max(self.by_end, key=lambda end: len(self.by_end[end]), default=None)

    def amend(self, end: Place, seconds: float) -> None:
        """The last one has taken so much more."""
        if self.by_end.get(end):
            self.by_end[end][-1] += seconds
        self.spent += seconds

    def best(self, end: Place) -> float:
        """The fastest of those that ended there; 0 if none did."""
        return min(self.of(end), default=0.0)

    def middle(self, end: Place) -> float:
        """The median of those that ended there; 0 if none did."""
        return statistics.median(self.of(end) or (0.0,))

    def suffice(self, end: Place, samples: int) -> bool:
        """Whether there are so many of those that ended there, or it has become clear that there will not be."""
        return len(self.of(end)) >= samples - 1 or self.count >= MOST

    def copy(self) -> Times:
        """The same, which go on alone."""
        other = Times()
        other.by_end = {end: times.copy() for end, times in self.by_end.items()}
        other.count, other.spent = self.count, self.spent
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
        self.spent = 0.0


def is_worth(fused: float, native: float) -> bool:
    """Whether what runs so fast fused should."""
    return fused < WORTH * native


def pause(before: float, best: float, close: bool, lost: float) -> float:
    """Seconds until the slower way is tried again: after `before`, the time until this try, where the faster one takes
    `best` and trying the other has `lost` so much."""
    first = (SOON if close else AGAIN) * best
    return max(first, min(2 * before, LONGEST * best), lost / LOSS)


@dataclass(frozen=True, slots=True)
class Choice:
    """The faster way, and what the fastest segment took each way, in seconds."""

    native: bool
    fused_s: float
    native_s: float

    @property
    def best(self) -> float:
        """What a segment takes the way that was chosen."""
        return self.native_s if self.native else self.fused_s

    @property
    def worst(self) -> float:
        """What it takes the other way; 0 if that is not known."""
        return self.fused_s if self.native else self.native_s

    def tell(self, place: Place, remembered: bool) -> None:
        """Say what has been chosen for what begins at `place`, and whether another process has measured it."""
        LOG.emit(
            "pace",
            site=str(describe(place)),  # type: ignore[arg-type]
            native=self.native,
            fused_s=self.fused_s,
            native_s=self.native_s,
            remembered=remembered,
        )

    @property
    def is_close(self) -> bool:
        """Whether the two ways took about as long."""
        return max(self.fused_s, self.native_s) <= CLOSE * min(self.fused_s, self.native_s)


@dataclass
class Segment:
    """What is known about the segments that begin in one way.

    `owed` is what the compile cache is to be told of (what ran, where it ended, the choice), or to be asked for (no
    choice); `offered` is its answer, which comes from another thread.
    """

    place: Place
    fused: Times = field(default_factory=Times)
    native: Times = field(default_factory=Times)
    end: Place = None  # of those that decided
    chosen: bool | None = None  # native; None while it is being measured
    until: float = 0.0  # when the other way is tried again, and how many seconds after the choice that is
    length: float = 0.0
    steady: Steady = field(default_factory=Steady)
    ran: dict[Place, Ran] = field(default_factory=dict)  # by the last fused one that ended there
    asked: set[Ran] = field(default_factory=set)
    owed: list[tuple[Ran, Place, Choice | None]] = field(default_factory=list)
    offered: tuple[Place, Choice] | None = None
    kept: bool | None = None  # while the other way is tried again: the one that was chosen, whose times are old
    tried: bool = False  # torch alone, without our mode on its stack, since fused was last found to be worth it
    trying: bool = False  # and that is what is being done
    alone_s: float = 0.0  # the fastest one then; 0 if there was none
    paid: bool = False  # it was found to be faster fused, and that has been told
    size: int = 0  # of the first one, where lengths keep changing

    def took(
        self, seconds: float, native: bool, end: Place, flushes: Sequence[Pieces | None] = (), same: bool = False
    ) -> Times | None:
        """One of them is over; it runs the `same` both ways, as nothing was recorded. Returns where it was counted."""
        times = self.native if native else self.fused
        if self.chosen is None:
            times.add(end, seconds)
            if same and not native:
                self.native.add(end, seconds)  # or chance would decide, and hold on to our mode where torch is alone
            if not native:
                self.ran[end] = ran = tuple(flushes)
                if ran and ran not in self.asked and len(self.asked) < ASKS:
                    self.asked.add(ran)
                    self.owed.append((ran, end, None))
            return times
        if native is not self.chosen or end != self.end:
            return None
        if not self.steady.holds(seconds):
            self.chosen, self.kept, self.length = None, None, 0
            self._forget(self.fused)
            self._forget(self.native)
            return None
        if self.trying:
            return None
        times.add(end, seconds)
        return times

    def share(self, size: int) -> float:
        """By what the time of one of such a size is to be multiplied, to compare it with that of others."""
        if not size:
            return 1.0
        self.size = self.size or size
        return self.size / size

    def _forget(self, times: Times) -> None:
        times.clear()
        self.tried, self.trying, self.alone_s = False, False, 0.0

    def twin(self) -> Segment:
        """One that begins with the same op after something else: the same, as long as it takes the same time."""
        return replace(
            self,
            fused=self.fused.copy(),
            native=self.native.copy(),
            ran=dict(self.ran),
            asked=set(),
            owed=[],
            steady=Steady(self.steady.expected),
            offered=None,
        )

    @property
    def is_unknown(self) -> bool:
        """Whether nothing has been measured yet."""
        return self.chosen is None and not (self.fused.count or self.native.count)

    @property
    def is_settled(self) -> bool:
        """Whether there is a choice, and it is not time to try the other way again."""
        return self.chosen is not None and time.perf_counter() < self.until

    def wants_native(self) -> bool:
        """Which way the next segment of this kind should run."""
        if self.offered is not None:
            (end, choice), self.offered = self.offered, None
            if self.chosen is None:  # else what was measured here came first
                self.end = end
                self._settle_on(choice, remembered=True)
        if self.is_settled:
            return bool(self.chosen)
        if self.chosen is not None:
            if not self.trying:
                kept, other = (self.native, self.fused) if self.chosen else (self.fused, self.native)
                kept.keep(self.end, self._samples)
                self._forget(other)
                self.kept = self.chosen
            self.chosen, self.trying = None, False
        self.end = (self.fused if self.fused.count else self.native).usual()
        if not self._suffices(self.fused, self.native):
            return False
        return not self._suffices(self.native, self.fused) or self._choose()

    def _suffices(self, times: Times, other: Times) -> bool:
        """Whether one way has been tried often enough: to find that it is still the slower one, once is, and to find at
        first that it is by far, twice."""
        factor, least = (CLOSE, 1) if self.length else (FAR, 2)
        slower = self._takes(times) > factor * self._takes(other) > 0 and len(times.of(self.end)) >= least
        return slower or times.suffice(self.end, self._samples)

    @property
    def _samples(self) -> int:
        return 2 * SAMPLES if self.size else SAMPLES

    def _takes(self, times: Times) -> float:
        """How long one takes: where lengths change, the fastest one had a length that suits it."""
        return times.middle(self.end) if self.size else times.best(self.end)

    def _choose(self) -> bool:
        # Where nothing ended alike both ways there is nothing to compare: fused, as asked for.
        fused, native = self._takes(self.fused), self._takes(self.native)
        kept, self.kept = self.kept, None
        if kept is not None and native and is_worth(fused, native) is kept:
            # It would be given up for times of another hour: a program that logged in every step may not do so now.
            (self.native if kept else self.fused).clear()
            return kept
        if native and is_worth(fused, native) and native < FAR * fused and not self.tried:
            return self._try_alone(native)
        native = min(native, self.alone_s or native)
        choice = Choice(bool(native) and not is_worth(fused, native), fused, native)
        if fused and native:
            self.owed.append((self.ran.get(self.end, ()), self.end, choice))
        return self._settle_on(choice, remembered=False)

    def _try_alone(self, native: float) -> bool:
        """Before fused is chosen: below our mode torch takes more time than alone, sometimes twice as much."""
        self.tried = self.trying = self.chosen = True
        self.native.count, self.native.spent = self.native.count + SAMPLES, self.native.spent + SAMPLES * native
        self.until, self.steady = time.perf_counter() + SAMPLES * native, Steady()
        return True

    def _settle_on(self, choice: Choice, remembered: bool) -> bool:
        slower = self.fused if choice.native else self.native
        # The second: those that ended elsewhere may have been much shorter.
        lost = max(slower.spent - slower.count * choice.best, slower.count * (choice.worst - choice.best))
        self.length = pause(self.length, choice.best, choice.is_close, lost)
        self.chosen, self.until = choice.native, time.perf_counter() + self.length
        # What is timed is torch below our mode, which may be a good deal slower than alone.
        self.steady = Steady((choice.native and self._takes(self.native)) or choice.best)
        choice.tell(self.place, remembered)
        return choice.native
