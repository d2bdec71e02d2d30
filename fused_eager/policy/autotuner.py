"""The autotuner: is this part of the program faster fused or native? Measured where the program waits, not assumed.

Recording an op costs a few microseconds, and XLA is not ahead of ATen everywhere, so a model of tiny ops, or one whose
time goes into products that both compute alike, may run faster natively. The time between two reads of computed
values (`loss.item()`) is what the program's user waits for, whichever way its ops ran: such a segment (`segment`) is
what is timed. Segments are known by the line of the read before them (or of the optimizer step, where nothing is read,
or where the context is entered) and by the first op that comes, its line and the shapes it takes; a new one goes the
way that was found for another that began with the same op, for as long as it takes about as long. Segments in which
something was compiled, or run for the first time, do not count.

Where native is the way for all of a turn of the loop, the front door leaves torch's stack of modes until it is time to
try again (`frontends.context.bypass`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ..bounded import Bounded
from .alone import Turn
from .iteration import Iteration
from .segment import Choice, Pieces, Segment
from .times import Place, Steady, Times

# Seconds that what was found in some contexts is taken for true of the next ones that are entered there: at first, and
# in the end, doubled each time that so many more confirm it.
TRUST, TRUST_MOST, CONFIRM = 2.0, 16.0, 2
SOME, MOST = 8, 1024  # contexts in a row that are natively faster, until those that follow are taken to be
PLACES = 1024
IDLE = 4096  # segments in a row that are the same both ways, until torch alone is taken to suit what follows
FLUSHES = 64  # in a segment that can be told from others elsewhere

TURNS: tuple[Turn, ...] = ("step", "sync", "read")

# What has been measured, and where a program reads: for all contexts of the process.
SEGMENTS: Bounded[Place, Segment] = Bounded(PLACES)
ALIKE: Bounded[Place, Segment] = Bounded(PLACES)  # the last of those that began with the same op, wherever they did
BOUNDARIES: Bounded[Place, bool] = Bounded(PLACES)
# Where segments begin whose lengths keep changing: they are one, and what each takes counts for its length.
VARYING: Bounded[Place, bool] = Bounded(PLACES)
ENTRIES: Bounded[Place, Entries] = Bounded(PLACES)
ITERATIONS: Bounded[Place, Iteration] = Bounded(PLACES)  # of the loops in contexts that are entered there


def forget() -> None:
    """As if the process had just started."""
    for table in (SEGMENTS, ALIKE, BOUNDARIES, VARYING, ENTRIES, ITERATIONS):
        table.clear()


@dataclass(slots=True)
class Entries:
    """What was found in the contexts that are entered on one line, which may be a function that is called for one model
    and another: torch alone sees none of them, so some in a row have to be natively faster until it is, and more where
    one was faster fused after so many."""

    until: float = 0.0  # all of them are to run natively
    single: Segment | None = None  # the one that they are, if they are one
    native: int = 0  # in a row, up to the last one that was seen
    enough: int = field(default_factory=lambda: SOME)
    trust: float = TRUST
    steady: Steady = field(default_factory=Steady)

    def alone(self, seconds: float) -> None:
        """One has taken so long of which torch has run all. What takes another time by now is something else."""
        if self.single is not None and not self.steady.holds(seconds):
            self._doubt()

    def _doubt(self) -> None:
        self.until, self.native, self.trust, self.steady = 0.0, 0, TRUST, Steady()

    def left(self, until: float, single: Segment | None, fused: bool) -> None:
        """One of them is over, all of which is to run natively until then; or a part of it `fused`, by choice."""
        now = time.perf_counter()
        self.until, self.single = 0.0, single
        if fused:
            self.enough = min(max(self.enough, 2 * (self.native + 1)), MOST)
            self.trust = TRUST
        self.native = self.native + 1 if now < until else 0
        if self.native >= self.enough:
            self.until, self.native = min(until, now + self.trust), max(self.enough - CONFIRM, 0)
            self.trust = min(2 * self.trust, TRUST_MOST)


@dataclass(slots=True)
class Autotuner:
    """The way in which a thread runs now, and since when."""

    native: bool = False
    waiting: bool = True  # a boundary was passed, and no op has come since
    countdown: int = 0  # ops until the native segment that is running ends, where nothing else says so
    after: Place = None  # that boundary
    running: Segment | None = None
    start: Place = None  # of it: the line and the op
    size: int = 0  # of what its first op takes, where lengths keep changing
    began: float = 0.0
    disturbed: bool = True  # the segment that is running does not count
    last: Times | None = None  # where the one before it was counted, if it was
    stepping: bool = False  # an optimizer is at work: what it reads for itself is no boundary
    flushes: list[Pieces | None] = field(default_factory=list)  # since the last boundary
    unread: bool = True  # nothing has been read since the last optimizer step
    entries: Entries = field(default_factory=Entries)  # the contexts that are entered where this one was
    iteration: Iteration = field(default_factory=Iteration)  # the turns of the loop in it
    alone: float = math.inf  # until when all that has been begun is to run natively
    fused: bool = False  # some of it is faster fused
    begun: int = 0  # segments since the last turn
    single: Segment | None = None  # the one that there is in a turn
    idle: int = 0  # segments in a row that are the same both ways,
    idle_since: float = 0.0  # and when the first of them had ended
    unsure: set[Turn] = field(default_factory=lambda: set(TURNS))  # since the last one, something else was chosen

    def enter(self, place: Place) -> float:
        """A context is entered at `place`: until when all of it is to run natively, as far as is known; 0 if it is
        not."""
        self.after = (place, "entry")
        self.disturbed, self.began = False, time.perf_counter()
        self.iteration = ITERATIONS.keep(self.after, self.iteration)
        self.entries = ENTRIES.keep(self.after, self.entries)
        self.single = self.entries.single
        return self.entries.until

    def amend(self, seconds: float) -> None:
        """The segment that ended last has taken so much more."""
        if self.last is not None and self.running is not None:
            self.last.amend(self.after, seconds * self.running.share(self.size))

    def leave(self, bypassed: bool) -> None:
        """The context is left; `bypass`: torch was alone then."""
        now = time.perf_counter()
        if self.running is None:
            if bypassed:  # all the time
                self._was_alone(now - self.began)
                self.entries.alone(now - self.began)
        else:
            self.entries.left(self.alone, self.running if self.begun == 1 else None, self.fused)

    def _was_alone(self, seconds: float) -> None:
        segment = self.single
        if segment is not None and segment.trying and not segment.size:
            segment.alone.append(seconds)

    def passed(self, place: Place, waited: bool, stepped: bool = False, idle: bool = False) -> None:
        """The program has read a value at `place`; `waited`: the value was not in native memory before. Or an optimizer
        has `stepped` there, which is another boundary than the numbers of the host that it reads. `idle`: all values
        there are lie in native memory.
        """
        key = (place, stepped)
        if key not in BOUNDARIES:
            if not waited:
                return  # a number of the host, as an optimizer's step count: no boundary
            BOUNDARIES[key] = True
        now = time.perf_counter()
        if not self.waiting and self.running is not None:
            self.last = None
            if self.disturbed:
                self.iteration.disturb()
            else:
                seconds = (now - self.began) * self.running.share(self.size)
                same = idle and not self.flushes
                self.last = self.running.took(seconds, self.native, key, self.flushes, same)
            if not self.chose_native:
                self.unsure.update(TURNS)
            self.idle = self.idle + 1 if self.running.one_way else 0
            if self.idle == 1:
                self.idle_since = now
        self.after, self.waiting, self.unread, self.disturbed = key, True, False, False
        self.flushes.clear()
        self.began = time.perf_counter()

    def varies(self) -> None:
        """What has been flushed may be of any length."""
        if self.start not in VARYING:
            VARYING[self.start] = True
            self.restart()

    def flushed(self, pieces: Pieces | None) -> None:
        """A flush has run these regions."""
        if len(self.flushes) <= FLUSHES:  # one more than can be told apart, so that it is seen
            self.flushes.append(pieces)

    def begin(self, place: Place, op: Hashable, shapes: Sequence[Sequence[int] | None] = ()) -> bool:
        """The first op of a segment comes from `place`; it and the shapes it takes tell it from others there.

        Returns:
            Whether the way in which ops run has changed.
        """
        self.start = (place, op)
        self.size = sum(math.prod(s) for s in shapes if s) if self.start in VARYING else 0
        first = (op, *(() if self.size else shapes))
        key, alike = (self.after, place, first), ALIKE.get((place, first))
        if self.after is None:  # what the program did while torch was alone is a part of it: nothing to measure
            segment = alike or Segment(place)
        else:
            found = SEGMENTS.get(key)
            if (found is None or found.is_unknown) and alike is not None and alike.has_choice:
                found = alike.twin()
            segment = SEGMENTS[key] = ALIKE[place, first] = found or Segment(place)
        before, self.native = self.native, segment.wants_native()
        self.running, self.waiting = segment, False
        self.begun += 1
        self.iteration.begins(segment, self.start, first[1:])
        self.alone = min(self.alone, segment.until if segment.chosen else 0.0)
        self.fused = self.fused or segment.chosen is False
        return self.native is not before

    def go_along(self) -> None:
        """The first op of a segment comes in a thread in whose name another one is there that has stepped aside: it
        runs natively as well, and there is nothing to measure."""
        self.native, self.waiting, self.running = True, False, None

    @property
    def is_sampling(self) -> bool:
        """Whether the segment that is running is timed to make a choice."""
        return self.running is None or self.running.chosen is None

    @property
    def chose_native(self) -> bool:
        """Whether the segment that is running, or ran last, runs natively by choice."""
        return self.running is not None and self.running.chosen is True

    @property
    def is_idle(self) -> bool:
        """Whether the program has done nothing for long but read what is there. A few such reads say nothing: a step
        may come after them that is faster fused, and torch alone would not see it."""
        return self.idle > IDLE

    @property
    def suits_torch_alone(self) -> bool:
        """Whether the segment that is running, or ran last, speaks for torch alone where it is followed by a turn."""
        return self.is_idle or (self.chose_native and self.running is not None and not self.running.one_way)

    def native_until(self) -> float:
        """Until when the segment that is running is to run natively; 0 if it is not."""
        return self.running.until if self.running is not None and self.chose_native else 0.0

    def rest(self, turn: Turn) -> float:
        """A turn has ended: until when everything is to run natively, as far as is known; 0 if it is not."""
        self.single, self.begun = self.running if self.begun == 1 else None, 0
        known = turn not in self.unsure and not self.unread
        self.unsure.discard(turn)
        self.unread = self.unread or turn == "step"
        if self.is_idle:  # for as long again: what comes then, and is faster fused, is late by no more than that
            now = time.perf_counter()
            return now + (now - self.idle_since)
        return self.native_until() if known else 0.0

    def turned(self) -> float:
        """An optimizer step has ended a turn: until when torch is to be alone, whatever suits each segment; or 0."""
        return 0.0 if self.iteration.passes_by() else self.iteration.ended(time.perf_counter())

    def resume(self, fastest: float, middle: float) -> None:
        """The front door is back. The fastest of turns that took about as long took so long (0: they did not), and that
        is what they take in the `middle` (0: nobody knows). What was read in the meantime is not known."""
        if fastest:
            self._was_alone(middle or fastest)
        iteration = self.iteration
        if iteration.tried(time.perf_counter(), middle):
            Choice(iteration.alone, iteration.fused_s, middle).tell(iteration.place, remembered=False)
        self.after, self.idle = None, 0
        self.restart()

    def restart(self) -> None:
        """Something else than the program's own work has happened or will: the running segment does not count."""
        self.disturbed = True
