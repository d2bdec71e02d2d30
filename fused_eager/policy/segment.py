"""A segment: the ops between two reads of the program, what they took each way, and which way is kept.

Some of them are timed fused, some natively, until it is clear which way is faster, and that way is kept. Now and then
the other one is looked at again, against what the kept one has taken last: a machine is slower at one time than at
another. Where a segment suddenly takes twice as long, or half, and the machine alone does not do that, it is another
one than it was: both ways are measured again.

What was chosen is owed to the compile cache, and what another process chose may be offered by it (`executing.choices`):
it is then taken as if it had been measured here, and given up like that where it turns out to be wrong here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..log.events import LOG
from ..log.site import describe
from .compare import WORTH, gain, is_clear, is_worth
from .times import MOST, SAMPLES, Noise, Place, Steady, Times, usual

CLOSE = 1.5  # the slower way takes at most so many times the faster: a busy moment may have decided
FAR = 4.0  # neither a busy moment nor our mode makes torch so many times slower: it is
LOOK_S = 0.5  # seconds that may go into segments of one way until they tell it from the other
# The other way is tried again after the time of so many segments, then doubled each time: after a close call from the
# first to the second, or to so many seconds; after any other from the second to the third. And not before what it cost
# to try it is so small a part of the time since.
SOON, AGAIN, LONGEST, LONGEST_S = 16, 256, 16_384, 6.0
LOSS = 0.01
DOUBTS = 64  # blocks in a row, at most, that are slower than the other way was, until that is tried
ASKS = 4  # times that a segment's choice is asked for

Pieces = tuple[tuple[str, str], ...]  # the regions of a flush: who runs it (xla or aten), the digest of its key
Ran = tuple[Pieces | None, ...]  # the flushes of a segment; None where a region has no key


def pause(before: float, best: float, close: bool, lost: float) -> float:
    """Seconds until the slower way is tried again: after `before`, the time until this try, where the faster one takes
    `best` and trying the other has `lost` so much."""
    first, most = (SOON * best, max(AGAIN * best, LONGEST_S)) if close else (AGAIN * best, LONGEST * best)
    return max(first, min(2 * before, most), lost / LOSS)


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
            "choice",
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
    one_way: bool = False  # nothing of the last fused one was recorded: it runs the same both ways
    asked: set[Ran] = field(default_factory=set)
    owed: list[tuple[Ran, Place, Choice | None]] = field(default_factory=list)
    offered: tuple[Place, Choice] | None = None
    kept: bool | None = None  # while the other way is tried again: the one that was chosen, whose times are old
    tried: bool = False  # torch alone, without our mode on its stack, since fused was last found to be worth it
    trying: bool = False  # and that is what is being done
    alone: list[float] = field(default_factory=list)  # seconds of each of those
    paid: bool = False  # it was found to be faster fused, and that has been told
    size: int = 0  # of the first one, where lengths keep changing
    last: Choice | None = None  # what it was chosen by last
    noise: Noise = field(default_factory=Noise)  # of the way that was
    doubts: int = 0  # blocks in a row that took longer than the other way had,
    enough: int = 1  # and how many there have to be

    def took(
        self, seconds: float, native: bool, end: Place, flushes: Sequence[Pieces | None] = (), same: bool = False
    ) -> Times | None:
        """One of them is over; it runs the `same` both ways, as nothing was recorded. Returns where it was counted."""
        times = self.native if native else self.fused
        if self.chosen is None:
            times.add(end, seconds)
            if same and not native:
                self.native.add(end, seconds)  # or chance decides, and holds on to our mode where torch is alone
            if not native:
                self.one_way = same
                self.ran[end] = ran = tuple(flushes)
                if ran and ran not in self.asked and len(self.asked) < ASKS:
                    self.asked.add(ran)
                    self.owed.append((ran, end, None))
            return times
        if native is not self.chosen or end != self.end:
            return None
        if not self.steady.holds(seconds, self.noise.deviation):
            self.chosen, self.kept, self.length, self.last = None, None, 0, None
            self.noise.interrupt()
            self._forget(self.fused)
            self._forget(self.native)
            return None
        if self.trying:
            return None
        times.add(end, seconds)
        self._doubt(self.noise.add(seconds))
        return times

    def _doubt(self, block_s: float) -> None:
        """Those of the last block took so long (0: it is not full). The other way is tried at once where it had taken
        less, and each time that this was in vain, later."""
        last = self.last
        if not (block_s and last and last.worst) or last.worst == last.best:  # of one and the same way
            return
        ours, other = (WORTH * block_s, last.worst) if last.native else (block_s, WORTH * last.worst)
        self.doubts = self.doubts + 1 if ours > other and block_s > last.best else 0
        if self.doubts > self.enough:
            self.doubts, self.enough, self.until = 0, min(2 * self.enough, DOUBTS), 0.0

    def share(self, size: int) -> float:
        """By what the time of one of such a size is to be multiplied, to compare it with that of others."""
        if not size:
            return 1.0
        self.size = self.size or size
        return self.size / size

    def _forget(self, times: Times) -> None:
        times.clear()
        self.tried, self.trying = False, False
        self.alone.clear()

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
            alone=list(self.alone),
            noise=Noise(self.noise.variance),
            offered=None,
        )

    @property
    def is_unknown(self) -> bool:
        """Whether nothing has been measured yet."""
        return self.chosen is None and not (self.fused.count or self.native.count)

    @property
    def has_choice(self) -> bool:
        """Whether there is a choice, and it is not time to try the other way again."""
        return self.chosen is not None and time.perf_counter() < self.until

    def wants_native(self) -> bool:
        """Which way the next segment of this kind should run."""
        if self.offered is not None:
            (end, choice), self.offered = self.offered, None
            if self.chosen is None:  # else what was measured here came first
                self.end = end
                self._keep(choice, remembered=True)
        if self.has_choice:
            return bool(self.chosen)
        if self.chosen is not None:
            if not self.trying:
                kept, other = (self.native, self.fused) if self.chosen else (self.fused, self.native)
                kept.keep(self.end, self._samples)
                self._forget(other)
                self.kept = self.chosen
            self.chosen, self.trying = None, False
        self.end = (self.fused if self.fused.count else self.native).usual_end()
        if not self._suffices(self.fused, self.native):
            return False
        return not self._suffices(self.native, self.fused) or self._choose()

    def _suffices(self, times: Times, other: Times) -> bool:
        """Whether one way has been tried often enough: to find that it is still the slower one, or at first that it is
        by far, twice is."""
        found = times.of(self.end)
        if len(found) > 1 and min(found) > (CLOSE if self.length else FAR) * self._takes(other)[0] > 0:
            return True
        if not times.suffice(self.end, self._samples):
            return False
        if times.count >= MOST or sum(found) > LOOK_S or not other.of(self.end):
            return True
        return self._tells()

    def _tells(self) -> bool:
        """Whether what was timed tells the ways apart."""
        if self.one_way:
            return True
        (fused, error), (native, other) = self._takes(self.fused), self._takes(self.native)
        return is_clear(gain(fused, native), error**2 + other**2 + self.noise.variance)

    @property
    def _samples(self) -> int:
        return 2 * SAMPLES if self.size else SAMPLES

    def _takes(self, times: Times) -> tuple[float, float]:
        """How long one takes, and the error of that; in the middle, where lengths change: some suit a way better."""
        return usual(times.of(self.end), middle=bool(self.size))

    def _choose(self) -> bool:
        # Where nothing ended alike both ways there is nothing to compare: fused, as asked for.
        fused, native = self._takes(self.fused)[0], self._takes(self.native)[0]
        if self.one_way:
            native = fused  # when the other way is tried again, too: or chance decides after all
        if self.alone:
            native = min(native, usual(self.alone[1:] or self.alone)[0])
        kept, self.kept = self.kept, None
        both = bool(fused and native)
        to_native = both and not is_worth(fused, native)
        if both and kept is not None and to_native is not kept:
            # It would be given up for times of another hour: a program that logged in every step may not do so now.
            (self.native if kept else self.fused).clear()
            return kept
        if both and not to_native and native < FAR * fused and not self.tried:
            return self._try_alone(native)
        choice = Choice(to_native, fused, native)
        if both and not self.one_way:
            self.owed.append((self.ran.get(self.end, ()), self.end, choice))
        return self._keep(choice, remembered=False)

    def _try_alone(self, native: float) -> bool:
        """Before fused is chosen: below our mode torch takes more time than alone, sometimes twice as much."""
        self.tried = self.trying = self.chosen = True
        self.native.count += SAMPLES
        self.until, self.steady = time.perf_counter() + SAMPLES * native, Steady()
        return True

    def _keep(self, choice: Choice, remembered: bool) -> bool:
        slower = self.fused if choice.native else self.native
        changes = self.last is not None and self.last.native is not choice.native
        lost = slower.count * max(choice.worst - choice.best, 0.0)
        self.length = pause(0.0 if changes else self.length, choice.best, choice.is_close, lost)
        self.chosen, self.until, self.last = choice.native, time.perf_counter() + self.length, choice
        self.noise.interrupt()
        # What is timed is torch below our mode, which may be a good deal slower than alone.
        self.steady = Steady((choice.native and self._takes(self.native)[0]) or choice.best)
        choice.tell(self.place, remembered)
        return choice.native
