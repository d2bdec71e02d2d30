"""Pace: is this part of the program faster fused or native? Measured where the program itself waits, not assumed.

Recording an op costs a few microseconds, and XLA is not ahead of ATen everywhere, so a model of tiny ops, or one whose
time goes into products that both compute alike, may run faster natively. The time between two reads of computed
values (`loss.item()`) is what the program's user waits for, whichever way its ops ran. A few such stretches are timed
fused, a few natively, and the faster way is kept; now and then the other one gets another chance. Stretches are known
by the line of the read at their end (or of the optimizer step, where nothing is read); which one comes next is guessed
from which came next last time. Stretches in which something was compiled, or run for the first time, do not count.

Where native is the way for all of a training step, the front door leaves torch's stack of modes altogether until it is
time to try again: passing an op on costs as much as a small op itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from .bounded import Bounded
from .events import LOG
from .site import describe

SAMPLES = 4  # stretches of each way that are timed; the first of them pays for the change and does not count
GAIN = 0.95  # native has to take less than this part of the fused time
AGAIN, LONGEST = 256, 16_384  # stretches until the other way is tried again: doubled each time it has lost
PLACES = 1024

Place = Hashable


@dataclass
class Stretch:
    """What is known about the stretches that end at one read."""

    place: Place
    fused: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    native: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    chosen: bool | None = None  # native; None while it is being measured
    left: int = 0
    length: int = AGAIN

    def wants_native(self) -> bool:
        """Which way the next stretch of this kind should run."""
        if self.chosen is not None:
            if self.left:
                self.left -= 1
                return self.chosen
            self.length = min(2 * self.length, LONGEST)
            (self.fused if self.chosen else self.native).clear()
            self.chosen = None
        if len(self.fused) < SAMPLES:
            return False
        return len(self.native) < SAMPLES or self._choose()

    def _choose(self) -> bool:
        fused, native = (min(list(times)[1:]) for times in (self.fused, self.native))
        self.chosen, self.left = native < GAIN * fused, self.length
        site = str(describe(self.place))  # type: ignore[arg-type]
        LOG.emit("pace", site=site, native=self.chosen, fused_s=fused, native_s=native)
        return self.chosen


# What has been measured, by the line of the read, and which read came next: for all contexts of the process.
STRETCHES: Bounded[Place, Stretch] = Bounded(PLACES)
FOLLOWING: Bounded[Place, Place] = Bounded(PLACES)


@dataclass
class Pace:
    """The way in which a thread runs now, and since when."""

    last: Place = None
    began: float = 0.0
    native: bool = False
    disturbed: bool = True  # the stretch that is running does not count
    upcoming: Stretch | None = None
    unread: bool = True  # nothing has been read since the last optimizer step
    sure: bool = True  # every stretch since then was followed by one for which native was chosen

    def passed(self, place: Place, waited: bool, stepped: bool = False) -> bool:
        """The program has read a value at `place`; `waited`: the value was not in native memory before. Or an optimizer
        has `stepped` there, which is another boundary than the numbers of the host that it reads.

        Returns:
            Whether the way in which the next ops run has changed.
        """
        key = (place, stepped)
        stretch = STRETCHES.get(key)
        if stretch is None:
            if not waited:
                return False  # a number of the host, as an optimizer's step count: no boundary
            stretch = STRETCHES[key] = Stretch(place)
        now = time.perf_counter()
        if not self.disturbed:
            (stretch.native if self.native else stretch.fused).append(now - self.began)
        FOLLOWING[self.last] = key
        self.last = key
        before = self.native
        upcoming = STRETCHES.get(FOLLOWING.get(key, key))
        self.native = upcoming is not None and upcoming.wants_native()
        self.upcoming, self.unread = upcoming, False
        self.sure = self.sure and upcoming is not None and upcoming.chosen is True
        self.disturbed = False
        self.began = time.perf_counter()
        return self.native is not before

    def is_sampling(self, place: Place) -> bool:
        """Whether the stretch that ends with an optimizer's step at `place` is still being timed."""
        stretch = STRETCHES.get((place, True))
        return stretch is None or stretch.chosen is None

    def rest(self) -> int:
        """An optimizer step has ended: for how many of them everything is to run natively, as far as is known."""
        known = self.sure and not self.unread and self.upcoming is not None
        self.sure = self.unread = True
        if not known or self.upcoming is None:
            return 0
        left, self.upcoming.left = self.upcoming.left, 0
        return left

    def restart(self) -> None:
        """Something else than the program's own work has happened or will: the running stretch does not count."""
        self.disturbed = True
