"""Torch alone: for how long ATen has run all ops of a thread, and what the turns of its loop take meanwhile.

A *turn* is what comes round in Python, outside of any op: an optimizer step, a `sync()`, or, where neither comes
(generating text), the read of a value.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from ..log.events import LOG
from .iteration import TIMED
from .times import FACTOR, Place, Steady

TOGETHER = 8  # reads whose times are compared with those of so many others
LOOKED_AT = 2 * TIMED  # turns of which each is looked at, to begin with
MARKED = 16  # reads for which the line that ends a turn need not come
TOLD_EVERY = 5.0  # seconds

# "entry" of a context stands for whatever turn comes first.
Turn = Literal["step", "sync", "read", "entry", "backward"]


@dataclass
class Turns:
    """The turns of one kind while torch is alone: how many, since they were last told of, and what they take."""

    kind: Turn
    since: float  # when the one that is under way began; 0 where that is not known
    count: int = 0
    fastest: float = math.inf
    slowest: float = 0.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKED_AT))  # seconds of each
    _spent: float = 0.0  # by those that have not been compared yet,
    _fresh: int = 0  # and how many these are
    _steady: Steady = field(default_factory=Steady)

    def ended(self, now: float, turns: int = 1) -> bool:
        """One has ended, or so many since the last that was told. False when it has become clear that they take another
        time now."""
        began, self.since = self.since, now
        self.count += turns
        if not began:
            return True
        took = (now - began) / turns
        self.last.append(took)
        self.fastest, self.slowest = min(self.fastest, took), max(self.slowest, took)
        self._spent, self._fresh = self._spent + now - began, self._fresh + turns
        # A turn of a loop may read several values, one long after the one before it and the others not.
        together = TOGETHER if self.kind == "read" else 1
        if self._fresh < together:
            return True
        usual = together * self._spent / self._fresh
        self._spent, self._fresh = 0.0, 0
        return self._steady.holds(usual)

    @property
    def usual(self) -> float:
        """What the fastest took, in seconds, if all took about as long; else 0."""
        return self.fastest if self.slowest <= FACTOR * self.fastest < math.inf else 0.0

    @property
    def middle(self) -> float:
        """What they take in the middle, in seconds, without the first one, which pays for the change; 0 if not two have
        ended since. Of an even number: every other one may be of another optimizer."""
        after = list(self.last)[-((len(self.last) - 1) // 2 * 2) :]
        return statistics.median(after) if len(self.last) > 2 else 0.0


@dataclass(slots=True)
class Alone:
    """Since when torch has run all ops of a thread, why, and the turns since then."""

    turns: Turns = field(default_factory=lambda: Turns("entry", 0.0))
    until: float = 0.0  # when our mode comes back, where it has left torch's stack
    _since: float = 0.0  # or since it was last told of; 0: torch is not alone
    _why: str = ""  # the code of the reason
    _recorded: bool = False  # something of the turn that is under way
    _mark: Place = None  # where it ends, if that is a read,
    _other_lines: int = MARKED  # and how many were elsewhere since then
    _others: bool = False  # turns of another kind have come

    @property
    def is_over(self) -> bool:
        """Whether the time is over for which our mode has left torch's stack."""
        return time.perf_counter() >= self.until

    def bypass(self, turn: Turn, until: float, why: str) -> None:
        """Our mode leaves torch's stack at a `turn`, until then."""
        self.until, self._since, self._why = until, time.perf_counter(), why
        self.turns = Turns(turn, 0.0 if turn == "entry" else self._since)

    def pass_on(self, natively: bool, why: str = "") -> None:
        """What follows is torch's, or not."""
        self._recorded = self._recorded or not natively
        if self._since and not (natively and self._why == why):
            self._tell(time.perf_counter())
            self._since = 0.0
        if natively and not self._since:
            self.turns, self._since, self._why = Turns("entry", 0.0), time.perf_counter(), why

    def end_turn(self, turn: Turn, place: Place) -> None:
        """A turn has ended, for a read at `place`, with our mode on torch's stack; torch has run all of it, or not."""
        if turn == "read" and not self._comes_round(place):
            return
        self._others = self._others or turn != "read"
        turns, recorded, self._recorded = self.turns, self._recorded, False
        if self._since and not recorded:
            if turn != turns.kind:
                turns.kind, turns.count = turn, 0
            turns.count += 1
            self.tell_now_and_then(time.perf_counter())

    def _comes_round(self, place: Place) -> bool:
        """Whether a read ends a turn: where nothing else does, one line's, for a turn may have several."""
        if place != self._mark:
            self._other_lines += 1
            if self._other_lines <= MARKED:
                return False
            self._mark = place
        self._other_lines = 0
        return not self._others

    def tell_now_and_then(self, now: float) -> None:
        """Say how long torch has been alone, where that was last said long ago: a live view has nothing else to go
        by."""
        if now - self._since > TOLD_EVERY:
            self._tell(now)

    def _tell(self, now: float) -> None:
        turns = self.turns
        LOG.emit("bypass", turn=turns.kind, turns=turns.count, seconds=now - self._since, reason=self._why)
        turns.count, self._since = 0, now
