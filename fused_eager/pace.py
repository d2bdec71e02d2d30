"""Pace: is this part of the program faster fused or native? Measured where the program itself waits, not assumed.

Recording an op costs a few microseconds, and XLA is not ahead of ATen everywhere, so a model of tiny ops, or one whose
time goes into products that both compute alike, may run faster natively. The time between two reads of computed
values (`loss.item()`) is what the program's user waits for, whichever way its ops ran. A few such stretches are timed
fused, a few natively, and the faster way is kept; now and then the other one gets another chance. Stretches are known
by the line of the read before them (or of the optimizer step, where nothing is read) and by the first op that comes,
its line and the shapes it takes; the first one in a context goes the way of the last that began with the same op.
Stretches in which something was compiled, or run for the first time, do not count. Where a stretch suddenly takes
twice as long, or half, it is another one than it was: both ways are measured again.

What was chosen is owed to the compile cache, and what another process chose may be offered by it (`choices`): it is
then taken as if it had been measured here, and given up like that where it turns out to be wrong here.

Where native is the way for all of a turn of the loop, the front door leaves torch's stack of modes until it is time to
try again (`aside`).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .bounded import Bounded
from .events import LOG
from .site import describe

SAMPLES = 4  # stretches of each way that are timed; the first of them pays for the change and does not count
MOST = 4 * SAMPLES  # and no more, where they end here and there
# Fused has to take less than this part of the native time: it also takes memory, and what the program holds goes to
# other memory after a context is entered, or a `sync()`, and back before the next: a third of a step, for an optimizer.
WORTH = 0.9
CLOSE = 1.5  # the slower way takes at most so many times the faster: a busy moment may have decided
# Stretches until the other way is tried again: after a close call, after any other; then doubled each time.
SOON, AGAIN, LONGEST = 64, 256, 16_384
FACTOR, SURPRISES = 2.0, 3  # so far from what was measured, so many times in a row: what was measured is something else
PLACES = 1024
FLUSHES, ASKS = 64, 4  # in a stretch that can be told from others elsewhere; times that a stretch's choice is asked for

Place = Hashable
Pieces = tuple[tuple[str, str], ...]  # the regions of a flush: who runs it (xla or aten), the digest of its key
Ran = tuple[Pieces | None, ...]  # the flushes of a stretch; None where a region has no key
Turn = Literal["step", "sync", "call"]
TURNS: tuple[Turn, ...] = ("step", "sync", "call")


@dataclass
class Steady:
    """Whether times stay about what they were."""

    expected: float = 0.0  # 0: the first one says
    surprises: int = 0

    def holds(self, seconds: float) -> bool:
        """Take one more time; False when it has become clear that they are others now."""
        if not self.expected:
            self.expected = seconds
        off = seconds > FACTOR * self.expected or FACTOR * seconds < self.expected
        self.surprises = self.surprises + 1 if off else 0
        return self.surprises < SURPRISES


class Times:
    """What stretches took that began alike and ran the same way, by where they ended: a loop that reads its loss every
    tenth step has stretches of a step, and short ones from the last step to the read.

    The first one pays for the change of ways and does not count.
    """

    def __init__(self) -> None:
        self.by_end: dict[Place, list[float]] = {}
        self.count = 0

    def add(self, end: Place, seconds: float) -> None:
        """One more."""
        if self.count:
            self.by_end.setdefault(end, []).append(seconds)
        self.count += 1

    def of(self, end: Place) -> list[float]:
        """Those that ended there."""
        return self.by_end.get(end, [])

    def usual(self) -> Place:
        """Where most of them ended."""
        return max(self.by_end, key=lambda end: len(self.by_end[end]), default=None)

    def suffice(self, end: Place) -> bool:
        """Whether there are enough of those that ended there, or it has become clear that there will not be."""
        return len(self.of(end)) >= SAMPLES - 1 or self.count >= MOST

    def clear(self) -> None:
        """Begin again."""
        self.by_end.clear()
        self.count = 0


def is_worth(fused: float, native: float) -> bool:
    """Whether what runs so fast fused should."""
    return fused < WORTH * native


@dataclass(frozen=True, slots=True)
class Choice:
    """The faster way, and what the fastest stretch took each way, in seconds."""

    native: bool
    fused_s: float
    native_s: float

    @property
    def is_close(self) -> bool:
        """Whether the two ways took about as long."""
        return max(self.fused_s, self.native_s) <= CLOSE * min(self.fused_s, self.native_s)


@dataclass
class Stretch:
    """What is known about the stretches that begin in one way.

    `owed` is what the compile cache is to be told of (what ran, where it ended, the choice), or to be asked for (no
    choice); `offered` is its answer, which comes from another thread.
    """

    place: Place
    fused: Times = field(default_factory=Times)
    native: Times = field(default_factory=Times)
    end: Place = None  # of those that decided
    chosen: bool | None = None  # native; None while it is being measured
    left: int = 0
    length: int = 0
    steady: Steady = field(default_factory=Steady)
    ran: dict[Place, Ran] = field(default_factory=dict)  # by the last fused one that ended there
    asked: set[Ran] = field(default_factory=set)
    owed: list[tuple[Ran, Place, Choice | None]] = field(default_factory=list)
    offered: tuple[Place, Choice] | None = None

    def took(self, seconds: float, native: bool, end: Place, flushes: Sequence[Pieces | None] = ()) -> None:
        """One of them is over."""
        if self.chosen is None:
            (self.native if native else self.fused).add(end, seconds)
            if not native:
                self.ran[end] = ran = tuple(flushes)
                if ran and ran not in self.asked and len(self.asked) < ASKS:
                    self.asked.add(ran)
                    self.owed.append((ran, end, None))
        elif native is self.chosen and end == self.end and not self.steady.holds(seconds):
            self.chosen, self.length = None, 0
            self.fused.clear()
            self.native.clear()

    def wants_native(self) -> bool:
        """Which way the next stretch of this kind should run."""
        if self.offered is not None:
            (end, choice), self.offered = self.offered, None
            if self.chosen is None:  # else what was measured here came first
                self.end = end
                self._settle_on(choice, remembered=True)
        if self.chosen is not None:
            if self.left:
                self.left -= 1
                return self.chosen
            (self.fused if self.chosen else self.native).clear()
            self.chosen = None
        self.end = (self.fused if self.fused.count else self.native).usual()
        if not self.fused.suffice(self.end):
            return False
        return not self.native.suffice(self.end) or self._choose()

    def _choose(self) -> bool:
        # Where nothing ended alike both ways there is nothing to compare: fused, as asked for.
        fused, native = (min(times.of(self.end), default=0.0) for times in (self.fused, self.native))
        choice = Choice(bool(native) and not is_worth(fused, native), fused, native)
        if fused and native:
            self.owed.append((self.ran.get(self.end, ()), self.end, choice))
        return self._settle_on(choice, remembered=False)

    def _settle_on(self, choice: Choice, remembered: bool) -> bool:
        first = SOON if choice.is_close else AGAIN
        self.length = min(2 * self.length, LONGEST) or first
        self.chosen, self.left = choice.native, self.length
        self.steady = Steady(choice.native_s if choice.native else choice.fused_s)
        site = str(describe(self.place))  # type: ignore[arg-type]
        LOG.emit(
            "pace",
            site=site,
            native=choice.native,
            fused_s=choice.fused_s,
            native_s=choice.native_s,
            remembered=remembered,
        )
        return choice.native


# What has been measured, and where a program reads: for all contexts of the process.
STRETCHES: Bounded[Place, Stretch] = Bounded(PLACES)
ALIKE: Bounded[Place, Stretch] = Bounded(PLACES)  # the last of those that began with the same op, wherever they did
BOUNDARIES: Bounded[Place, bool] = Bounded(PLACES)


def forget() -> None:
    """As if the process had just started."""
    for table in (STRETCHES, ALIKE, BOUNDARIES):
        table.clear()


@dataclass
class Pace:
    """The way in which a thread runs now, and since when."""

    native: bool = False
    waiting: bool = True  # a boundary was passed, and no op has come since
    after: Place = None  # that boundary
    running: Stretch | None = None
    began: float = 0.0
    disturbed: bool = True  # the stretch that is running does not count
    stepping: bool = False  # an optimizer is at work: what it reads for itself is no boundary
    flushes: list[Pieces | None] = field(default_factory=list)  # since the last boundary
    unread: bool = True  # nothing has been read since the last optimizer step
    unsure: set[Turn] = field(default_factory=lambda: set(TURNS))  # since the last one, something else was chosen

    def passed(self, place: Place, waited: bool, stepped: bool = False) -> None:
        """The program has read a value at `place`; `waited`: the value was not in native memory before. Or an optimizer
        has `stepped` there, which is another boundary than the numbers of the host that it reads.
        """
        key = (place, stepped)
        if key not in BOUNDARIES:
            if not waited:
                return  # a number of the host, as an optimizer's step count: no boundary
            BOUNDARIES[key] = True
        now = time.perf_counter()
        if not self.waiting and self.running is not None:
            if not self.disturbed:
                self.running.took(now - self.began, self.native, key, self.flushes)
            if not self.chose_native:
                self.unsure.update(TURNS)
        self.after, self.waiting, self.unread, self.disturbed = key, True, False, False
        self.flushes.clear()
        self.began = time.perf_counter()

    def flushed(self, pieces: Pieces | None) -> None:
        """A flush has run these regions."""
        if len(self.flushes) <= FLUSHES:  # one more than can be told apart, so that it is seen
            self.flushes.append(pieces)

    def begin(self, place: Place, first: Hashable) -> bool:
        """The first op of a stretch comes from `place`; `first` is what tells it from others there.

        Returns:
            Whether the way in which ops run has changed.
        """
        if self.after is None:  # entering the context is a part of it, so there is nothing to measure
            stretch = ALIKE.get((place, first)) or Stretch(place)
        else:
            key = (self.after, place, first)
            stretch = STRETCHES.get(key) or Stretch(place)
            STRETCHES[key] = ALIKE[place, first] = stretch
        before, self.native = self.native, stretch.wants_native()
        self.running, self.waiting = stretch, False
        return self.native is not before

    @property
    def is_sampling(self) -> bool:
        """Whether the stretch that is running is timed to make a choice."""
        return self.running is None or self.running.chosen is None

    @property
    def chose_native(self) -> bool:
        """Whether the stretch that is running, or ran last, runs natively by choice."""
        return self.running is not None and self.running.chosen is True

    def rest(self, turn: Turn) -> int:
        """A turn has ended: for how many of its kind everything is to run natively, as far as is known."""
        known = turn not in self.unsure and not self.unread
        self.unsure.discard(turn)
        self.unread = self.unread or turn == "step"
        if not known or self.running is None or not self.chose_native:
            return 0
        left, self.running.left = self.running.left, 0
        return left

    def resume(self, left: int) -> None:
        """The front door is back, `left` turns before it had to be."""
        if self.running is not None:
            self.running.left = max(left, 0)
        self.restart()

    def restart(self) -> None:
        """Something else than the program's own work has happened or will: the running stretch does not count."""
        self.disturbed = True
