"""Allowance: how much of a program's time may go into writing its ops down.

Writing an op down for the first time takes several times what a small op takes to run: a model of many small ops took
six times as long in its first step as in eager. So what is shadowed (`recording.shadow`) may take a share of the time
that passes, and what has been saved up of it. When that is used up a stream is given up where it is, and its thread
rests, as it does in the beginning: it runs natively up to a sync point at which enough has come together. What has been
written down is followed when it comes again, and writing goes on behind it. So a long stream is written down in several
rounds, each a little slower than eager; where ops are large, writing them down is little beside running them, and no
stream is given up.

That is what learning may cost at a time. What it may cost altogether is in a *purse*: whatever is done for shadowed
streams comes out of it, following those that have come before as well, and it fills by one percent of the time. A
program whose streams come to nothing (each is another one, or none is compiled) has spent it after some seconds and
runs natively but for that percent. A segment that turns out to be faster fused puts something back: learning has paid.

A large model takes longer to write down than there is in the purse. So what a stream has cost is put back when it is
compiled, or is about to be: it is no loss so far. And where one of the last streams had come further than before, the
purse may be overdrawn, as what has been spent on it would else be lost. Both are on credit, which is used up where
nothing that has been compiled turns out to be faster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from ..config import Config
from ..log.events import LOG
from .hotness import Backoff

SHARE = 0.25  # of the time that passes
LEAST = 1e-2  # seconds that have to have come together to go on, and the most that are saved up
HALVINGS = 4  # of the share, at most,
VAIN = 2  # one for so many streams in a row that had not come further than the time before
PURSE = 1.5  # seconds that may go into it to begin with, and the most that come together again
REFILL = 0.01  # of the time that passes goes into the purse,
PAID = 0.3  # and so many seconds for each segment that is faster fused
HOPE = 8  # streams in a row that may come to nothing after one that has come further
CREDIT = 3.0  # seconds that are put back for what is being compiled before a segment is found to be faster
PATIENCE = 0.5  # seconds at least until a thread goes on that passes no sync point


def limits(config: Config) -> bool:
    """Whether there is a limit: not where everything is to be recorded, or waited for, or a report is wanted, which
    lives on what is recorded."""
    return config.measures and not config.waits and not LOG.is_wanted


@dataclass(slots=True)
class Shadowed:
    """What the ops of a stream that is run as it is recorded (`recording.shadow`) have taken and made."""

    seconds: float = 0.0
    held: int = 0  # bytes that lived when it was last looked at
    young: int = 0  # bytes that have come since
    granted: float = 0.0  # seconds that may go into writing it down, besides a share of the above,
    written: float = 0.0  # those that have gone into it,
    followed: float = 0.0  # and into following what was written down before:
    came: int = 0  # so many ops


class Beginning(Protocol):
    """The first op of streams that begin alike."""

    reached: int  # how many ops of the last one had been written down when it was given up
    spent: float  # seconds that they have cost since one was last compiled


@dataclass
class Allowance:
    """What all threads have saved up, in seconds; below zero, what they owe."""

    saved: float = 0.0
    looked: float = 0.0  # when that was found out; 0: never
    resting: bool = True  # until enough has come together
    vain: int = 0  # streams in a row that were given up and had not come further than the time before
    purse: float = PURSE  # below zero: the stream that emptied it had begun before that
    credit: float = CREDIT
    hope: int = 0  # streams that may still come to nothing until the purse is not to be overdrawn

    def look(self) -> float:
        """What has come together by now."""
        now = time.perf_counter()
        if self.looked:
            passed = now - self.looked
            self.saved = min(self.saved + self._share * passed, max(LEAST, self.saved))
            self.purse = min(self.purse + REFILL * passed, max(PURSE, self.purse))
        self.looked = now
        return self.saved

    def enter(self, backoff: Backoff) -> None:
        """A thread enters its context. Until now nothing could have run in it, so that time does not count."""
        if not self.looked:
            LOG.emit("rest", ops=0, before=0, seconds=0.0)
        self.looked = time.perf_counter()
        if not self._is_enough():
            self._rest(backoff)

    @staticmethod
    def begin(seen: Shadowed | None) -> float:
        """An op is about to be recorded, of such a stream. Returns what `is_used_up` is told then."""
        return time.perf_counter() - (0.0 if seen is None else seen.seconds)

    def is_used_up(self, seen: Shadowed | None, ops: int, begun: float, is_new: bool) -> bool:
        """An op has been recorded that had `begun` so, and is the last of so many; it `is_new`, or has come before.
        Returns whether its stream is to be given up."""
        if seen is None or not ops:
            return False
        seconds = time.perf_counter() - seen.seconds - begun
        if not (seen.written or seen.followed):
            seen.granted = max(self.look(), 0.0)
        self.spend(seconds)
        if self._left < 0 and ops == 1:
            return True
        if not is_new:
            seen.followed += seconds
            seen.came += 1
            return False
        seen.written += seconds
        # As much as it took to come here may be added, or a long stream would never be done.
        return seen.written > max(seen.granted, seen.followed) + self._share * seen.seconds

    def spend(self, seconds: float) -> None:
        """So much has gone into what is done for a shadowed stream."""
        self.saved -= seconds
        self.purse -= seconds

    def ended(self, first: Beginning | None, seen: Shadowed, seconds: float, compiles: bool) -> None:
        """A shadowed stream has ended, for which so much was done then; whether it is compiled, or is to be."""
        self.spend(seconds)
        if first is None:
            return
        first.spent += seen.written + seen.followed + seconds
        self._saw(compiles or (bool(seen.written) and 0 < first.reached <= seen.came))
        if compiles:
            back = min(first.spent, self.credit, max(PURSE - self.purse, 0.0))
            self.purse, self.credit, first.spent = self.purse + back, self.credit - back, 0.0

    def excuse(self, seconds: float) -> None:
        """So much of what is being done is no part of it."""
        self.saved += seconds
        self.purse += seconds

    def paid(self) -> None:
        """A segment has turned out to be faster fused."""
        self.purse = max(self.purse, min(self.purse + PAID, PURSE))
        self.credit = CREDIT

    def give_up(self, first: Beginning, seen: Shadowed, ops: int, backoff: Backoff) -> None:
        """A shadowed stream of so many ops is given up, and its thread rests."""
        first.spent += seen.written + seen.followed
        if self._left >= 0:
            further = 0 < first.reached <= seen.came
            self.vain = 0 if further else self.vain + 1
            self._saw(further)
            first.reached = ops
        self._rest(backoff)
        LOG.emit("rest", ops=ops, before=seen.came, seconds=seen.written)

    def _saw(self, further: bool) -> None:
        """A stream has come further than the time before, or is compiled; or not."""
        self.hope = HOPE if further else max(self.hope - 1, 0)

    @property
    def _left(self) -> float:
        """What the purse has, or may owe."""
        return self.purse + (self.credit if self.hope else 0.0)

    @property
    def _share(self) -> float:
        return SHARE / (1 << min(self.vain // VAIN, HALVINGS))

    def _rest(self, backoff: Backoff) -> None:
        self.resting = self._is_short()
        owed = (LEAST - self.saved) / self._share, (LEAST - self._left) / REFILL
        backoff.rest(self._is_enough, max(PATIENCE, *owed))

    def _is_short(self) -> bool:
        """Whether not enough has come together."""
        return self.look() < LEAST or self._left < LEAST

    def _is_enough(self) -> bool:
        self.resting = self.resting and self._is_short()
        return not self.resting


ALLOWANCE = Allowance()
