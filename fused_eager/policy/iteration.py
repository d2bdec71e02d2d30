"""Whole turns: where a turn of a loop is several segments, torch alone may be faster than what was found for each.

A segment goes the way that is faster beside the others as they run just then (`segment`). What one leaves on the
device, though, the next has to fetch where that one goes the other way, so what either takes says little about a loop
in which all go one way: one that accumulates gradients, and reads the loss of each part, stayed at 1.1 of eager's time,
each part being faster fused beside an optimizer step that was. So turns that are partly fused are timed, then some that
torch runs alone; if these were faster, torch goes on alone. Later that is tried again, as for a segment.

A loop is known by where its context is entered, which may be a function that trains one model after the other. So what
was found holds for turns that begin like those that were timed; when several in a row begin otherwise, it is forgotten.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from .segment import CLOSE, Segment, pause
from .times import Place

ANY = "any"  # in place of the shapes that a turn begins with, where they differ from turn to turn
TIMED = 4  # turns that are timed each way; an even number, as every other one may be of another optimizer


@dataclass(slots=True)
class Iteration:
    """What is known about the turns of one loop. Times are in seconds, on the clock that the caller reads."""

    alone: bool = False  # torch runs them all, by choice
    trying: bool = False  # and that is being tried
    until: float = 0.0  # then it is to be found out anew
    length: float = 0.0  # how long after the last choice that was
    fused_s: float = 0.0  # a turn in the middle of those that were timed before torch was tried
    took: list[float] = field(default_factory=list)  # by turns that followed each other,
    fused: bool = False  # one of which at least was partly fused
    place: Place = None  # the line where the last turn began
    starts: dict[Place, Place] = field(default_factory=dict)  # the first ops of turns that were timed, and their shapes
    strangers: int = 0  # turns in a row that began otherwise since there is a choice
    _began: float = 0.0  # the turn that is under way; 0 if it does not count
    _segments: int = 0  # of it
    _last: Segment | None = None  # of them
    _only: Segment | None = None  # the one that the turn before was
    _fused: bool = False  # whether one of them is, by choice
    _counts: bool = True
    _strange: bool = False  # it began otherwise

    def begins(self, segment: Segment, start: Place = None, shapes: Place = None) -> None:
        """A segment begins, with this op on its line and operands of these shapes."""
        if not self._segments:
            self.place = segment.place
            if self.length:
                self._strange = start not in self.starts or self.starts[start] not in (ANY, shapes)
            else:
                self.starts[start] = shapes if self.starts.get(start, shapes) == shapes else ANY
        self._segments += 1
        self._last = segment
        self._fused = self._fused or segment.chosen is False
        self._counts = self._counts and segment.chosen is not None and not segment.trying

    def disturb(self) -> None:
        """The turn that is under way does not count."""
        self._counts = False

    def passes_by(self) -> bool:
        """Whether the turn that is over is one segment, and the one before was the same, as in most loops: there is
        nothing to time."""
        only = self._last if self._segments == 1 else None
        same, self._only = only is self._only, only
        if self._segments > 1 or not same or self.alone:
            return False
        self._start(0.0)
        return True

    def _start(self, now: float) -> None:
        self._began, self._segments, self._fused, self._counts, self._strange = now, 0, False, True, False

    def ended(self, now: float) -> float:
        """A turn is over. Returns until when torch is to run alone; 0 if it is not."""
        began, counts, fused, strange = self._began, self._counts, self._fused, self._strange
        self._start(now)
        self.strangers = self.strangers + 1 if strange else 0
        if strange:
            if self.strangers >= TIMED:
                self.forget()
            return 0.0
        if now < self.until:
            return self.until if self.alone else 0.0
        if self.alone or not (began and counts):
            self.alone = False
            self._forget_turns()
            return 0.0
        self.took.append(now - began)
        self.fused = self.fused or fused
        if len(self.took) < TIMED:
            return 0.0
        self.fused_s, self.trying = statistics.median(self.took), self.fused
        self._forget_turns()
        return now + (TIMED + 1) * self.fused_s if self.trying else 0.0

    def tried(self, now: float, native_s: float) -> bool:
        """Torch has been alone for some turns, which take so long in the middle (0: nobody knows). Returns whether
        that makes a choice."""
        self._began = 0.0
        if not self.trying:
            return False
        self.trying, self.alone = False, 0 < native_s < self.fused_s
        best, worst = sorted((native_s or 2 * self.fused_s, self.fused_s))  # it took so long that not three ended
        self.length = pause(self.length, best, worst <= CLOSE * best, TIMED * (worst - best))
        self.until = now + self.length
        return True

    def forget(self) -> None:
        """The loop is another one now."""
        self.alone = self.trying = False
        self.until = self.length = self._began = 0.0
        self.strangers = 0
        self.starts.clear()
        self._forget_turns()

    def _forget_turns(self) -> None:
        self.fused = False
        self.took.clear()
