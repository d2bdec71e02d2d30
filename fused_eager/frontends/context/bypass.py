"""Aside: where torch alone is faster for whole turns of a loop, the front door leaves torch's stack of modes.

Passing an op on costs as much as a small op itself, so a native segment of tiny ops is slow as long as the mode is
there. But what is not there sees nothing and has to be called back. A *turn* is what comes round in Python, outside of
any op: an optimizer step, a `sync()`, or, where neither comes (generating text), the read of a value. At a turn the
front door may step aside, and at a later one it returns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import follower, quiet
from ...devices.buffer import LOCK
from ...devices.host.heap import WATCH
from ...executing.materialize import hand_over
from ...log.events import LOG
from ...log.reasons import Reason
from ...policy.autotuner import Turn
from ...policy.iteration import TIMED
from ...policy.segment import LOSS
from ...policy.times import FACTOR, Place, Steady
from ...recording.rounds import Rounds
from ...tracing.stream import STREAMS, Stream
from . import entered

if TYPE_CHECKING:
    from typing_extensions import Self  # torch's; typing has it from Python 3.11 on

READS = 2  # values that are read without another kind of turn until reads are taken for one
LEAST = 4  # sync points that a backoff has to last to be worth the change
TOGETHER = 8  # reads whose times are compared with those of so many others
LOOKED_AT = 2 * TIMED  # turns, to begin with; after that
GLANCE = 4e-3  # seconds apart: turns that come faster are counted, and not looked at, as a look takes some 15 us
MARKED = 16  # reads for which the line that ends a turn need not come
TOLD_EVERY = 5.0  # seconds
SLOWER = 0.5  # of the time in which rounds are written down and timed is lost


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


class Bypass(TorchDispatchMode):
    """The mode of a thread whose ops go into `stream`, which can leave the thread's stack of modes and come back.

    `lender` is that of the thread in whose name this one is there, `lent` are those that are there in its own.
    """

    def __init__(self, stream: Stream, lender: Self | None):
        super().__init__()
        self.stream = stream
        self.lender = lender
        self.lent: set[Self] = set()
        self.bypassed = False  # torch runs alone, because that was measured to be faster
        self.hidden = False  # taken off the stack of modes for the length of a call
        self.reads = 0  # values that were read since the last other turn
        self.backwards = 0  # passes since the last turn
        self.unseen: dict[Turn, int] = dict.fromkeys(get_args(Turn), 0)  # turns since one of their kind was looked at
        self._looks = 0  # while aside
        self.blind_until = 0.0  # while aside: till then turns need not be looked at
        self._below: list[TorchDispatchMode] | None = None  # while aside, the modes that were below
        self.between = False  # while aside: it left between two ops, and comes back so if no turn comes
        self.carried = 0.0  # till when it is, if that was found out at a turn: contexts that follow do not end it
        self._until = 0.0  # when it comes back
        self.rounds = Rounds()  # of a loop that has no turns,
        self.came = 0.0  # and when it was entered, or came back last in one
        self._turns = Turns("entry", 0.0)  # while aside, and while all ops are passed on
        self._alone = 0.0  # since when torch runs them, or since it was last told of; 0: it does not
        self._why = ""  # the code of the reason
        self._recorded = False  # something of the turn that is under way
        self._mark: Place = None  # where it ends, if that is a read,
        self._elsewhere = MARKED  # and how many were elsewhere since then
        self._others = False  # turns of another kind have come

    @property
    def waits_for(self) -> Turn:
        """The kind of turn that it comes back at; "entry": whatever comes first."""
        return self._turns.kind

    def rounds_are_told(self) -> None:
        """Something else tells the rounds of the program's loop apart than its ops."""
        self.stream.autotuner.countdown = 0
        self.rounds.over()

    @property
    def is_over(self) -> bool:
        """While aside: whether the time is over for which it was to be."""
        return time.perf_counter() >= self._until

    def someone_is_bypassed(self) -> bool:
        """Whether this one is aside, or one of those in whose name it is there: a thread may start threads."""
        return self.bypassed or (self.lender is not None and self.lender.someone_is_bypassed())

    def begin_bypass(self, turn: Turn, until: float) -> None:
        """Leave this thread's stack of modes until then, and for as long as it is to run natively in any case.
        Nothing may be pending in its stream.
        """
        modes = quiet.stack()
        if self in modes:
            self.passes_on(False)
            self.carried = 0.0 if turn == "entry" else until
            self._leave_out(modes[: modes.index(self)], turn, until)
            quiet.restack([mode for mode in modes if mode is not self])

    def _leave_out(self, below: list[TorchDispatchMode], turn: Turn, until: float) -> None:
        self._below, self._until, self._alone = below, until, time.perf_counter()
        self._why = self.reason()
        self.bypassed, self._looks = True, 0
        for kind in self.unseen:
            self.unseen[kind] = 0
        follower.overlooked()
        self._turns = Turns(turn, 0.0 if turn == "entry" else self._alone)

    def enter_bypassed(self, until: float) -> None:
        """Enter the context without a place on the stack, until then, or for as long as this thread rests.

        Torch is told of it all the same. It keeps in each mode whether there were others when it came: told later,
        with modes of the program's above, it would note what is wrong as soon as these are gone.
        """
        below = quiet.stack()
        self.__enter__()
        quiet.restack(below)
        self._leave_out(below, "entry", until)

    def overlooks(self, turn: Turn) -> bool:
        """A turn has come. Whether it is counted and no more, as torch is alone: loops of short turns would feel it."""
        if time.perf_counter() >= self.blind_until:
            return False
        self.unseen[turn] += 1
        return True

    def turned_bypassed(self, turn: Turn) -> None:
        """A turn has ended; time to come back when that time is over, or when turns of this kind take another time."""
        now, turns, same = time.perf_counter(), self._turns, True
        self.unseen["read"] += follower.overlooked()
        ended, self.unseen[turn] = 1 + self.unseen[turn], 0
        if turns.kind == "entry":
            turns.kind = turn
        if turn == turns.kind:
            same = turns.ended(now, ended)  # else it is another program now
            self._tell_now_and_then(now)
            self.stream.backoff.passed_sync(ended)
        if not same:
            self.stream.autotuner.iteration.forget()
        if not same or (now >= self._until and not self.stream.backoff.left):
            self.come_back()
        else:
            self._looks += 1
            self._overlook(now + GLANCE if self._looks >= LOOKED_AT else 0.0)

    def _overlook(self, until: float) -> None:
        self.blind_until = until
        follower.overlook(until)

    def come_back(self) -> None:
        """Return to the place on the stack; if the modes that were below are no longer there, at the context's end."""
        modes, self.carried = quiet.stack(), 0.0
        if self._below is not None and modes[: len(self._below)] == self._below:
            modes.insert(len(self._below), self)
            quiet.restack(modes)
            self._return()

    def passes_on(self, natively: bool) -> None:
        """A segment begins, all of whose ops are passed on to torch; or another one, or this one is no longer there."""
        self._recorded = self._recorded or not natively
        if self._alone and not (natively and self._why == self.reason()):
            self._tell(time.perf_counter())
            self._alone = 0.0
        if natively and not self._alone:
            self._turns, self._alone, self._why = Turns("entry", 0.0), time.perf_counter(), self.reason()

    def reason(self) -> str:
        """Why torch runs ops now, if it does: a code."""
        backoff = self.stream.backoff
        return backoff.code if backoff.left else "region.native"

    def passed_on(self, turn: Turn) -> None:
        """A turn has ended, all of which was passed on, or not."""
        if turn == "read" and not self._comes_round():
            return
        self._others = self._others or turn != "read"
        turns, recorded, self._recorded = self._turns, self._recorded, False
        if self._alone and not recorded:
            if turn != turns.kind:
                turns.kind, turns.count = turn, 0
            turns.count += 1
            self._tell_now_and_then(time.perf_counter())

    def _comes_round(self) -> bool:
        """Whether a read ends a turn: where nothing else does, one line's, for a turn may have several."""
        place = self.stream.autotuner.after
        if place != self._mark:
            self._elsewhere += 1
            if self._elsewhere <= MARKED:
                return False
            self._mark = place
        self._elsewhere = 0
        return not self._others

    def _tell_now_and_then(self, now: float) -> None:
        if now - self._alone > TOLD_EVERY:  # a live view has nothing else to go by
            self._tell(now)

    def _tell(self, now: float) -> None:
        """Say how long torch has been alone."""
        turns = self._turns
        LOG.emit("aside", turn=turns.kind, turns=turns.count, seconds=now - self._alone, reason=self._why)
        self._turns.count, self._alone = 0, now

    def _return(self) -> None:
        self._below, self.bypassed, self.between = None, False, False
        self._overlook(0.0)
        self.unseen["read"] += follower.overlooked()
        self._turns.count += self.unseen[self._turns.kind]
        self.passes_on(False)
        self.stream.autotuner.resume(self._turns.usual, self._turns.middle)

    def __enter__(self) -> Self:
        entered.enters(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._below is not None:
            quiet.restack([*quiet.stack(), self])  # on top, from where it is taken
            self._return()
        self.passes_on(False)
        super().__exit__(*error)
        entered.has_left(self)


def enter(door: Bypass, place: Place, again: bool) -> None:
    """Enter the context at `place`: where torch alone was faster for all of it, the front door is aside from the first
    op on. If the context comes `again` and again it goes on as the one before ended: aside, or resting. (Else a rest
    needs turns: there may be none before the end.)"""
    if door.stream.config.measures:
        until = door.stream.autotuner.enter(place)
        until = max(until, door.carried if again else 0.0)
        if (time.perf_counter() < until or (again and rests(door))) and _is_alone(door):
            hand_over(Reason(door.reason()))
            door.enter_bypassed(until)
            return
    door.__enter__()


def leave(door: Bypass) -> None:
    """The context is left, all of which torch has run: for a thread that rests this is a sync point, if none came."""
    if door.waits_for == "entry":
        door.stream.backoff.passed_sync()


def turned(door: Bypass, turn: Turn) -> None:
    """A turn has come: the front door may step aside, or come back. Not from inside an op."""
    if door.hidden or door.overlooks(turn):
        return
    door.rounds_are_told()
    if torch._C._current_graph_task_id() != -1:
        return  # a backward pass has a stack of modes of its own: what we did to it would not last
    if door.bypassed:
        WATCH.look()
        door.turned_bypassed(turn)
        return
    if door not in quiet.stack():
        return  # inside of an op: it is we who read
    if turn != "read":
        door.reads = 0
    if turn != "backward":
        door.backwards = 0
    stream = door.stream
    if not stream.config.measures or stream.autotuner.stepping:
        return
    if turn in ("step", "sync"):
        door.passed_on(turn)
    if not _is_alone(door):
        return
    until = stream.autotuner.rest(turn)
    if turn == "step":
        until = stream.autotuner.turned() or until
    if until or rests(door):
        _step(door, turn, until)


def passed_backward(door: Bypass) -> None:
    """A backward pass has ended. A thread that rests leaves what follows to torch alone, up to the next turn."""
    door.rounds_are_told()
    if door.bypassed:
        if door.waits_for in ("entry", "backward"):
            turned(door, "backward")
        return
    inside = torch._C._current_graph_task_id() != -1
    if not inside and rests(door) and door in quiet.stack() and door.stream.config.measures and _is_alone(door):
        _step(door, "entry", 0.0)


def changes_between_ops(door: Bypass) -> bool:
    """Whether a thread without a turn rests, or its rounds are natively faster, and its door is there; or that is over,
    and it is not."""
    if door.bypassed:
        return door.between and not door.stream.backoff.is_on() and door.is_over
    autotuner = door.stream.autotuner
    return rests(door) or (autotuner.countdown > 0 and autotuner.native_until() > time.perf_counter())


def between_ops(door: Bypass) -> None:
    """The program is between two of its own lines, with nothing pending, where something `changes_between_ops`: the
    door leaves what follows to torch alone, or goes on recording."""
    now = time.perf_counter()
    if door.bypassed:
        door.come_back()
        door.rounds.align()
        door.came = now
    elif door not in quiet.stack() or not door.stream.config.measures or door.stream.autotuner.stepping:
        return
    elif _is_alone(door):
        until = 0.0
        if not rests(door):
            # Writing down and compiling is part of what it took to try the other way.
            until = max(door.stream.autotuner.native_until(), now + SLOWER * (now - door.came) / LOSS)
        _step(door, "entry", until)
        door.between = door.bypassed


def _step(door: Bypass, turn: Turn, until: float) -> None:
    with LOCK:
        hand_over(Reason(door.reason()))
        door.begin_bypass(turn, until)


def read(door: Bypass) -> None:
    """The program has read a value, and has it: where no other turn comes, this is one."""
    door.reads += 1
    door.rounds_are_told()
    if door.stream.autotuner.stepping:
        return  # an optimizer reads for itself
    if not door.bypassed:
        door.passed_on("read")
    if door.bypassed or (door.reads > READS and (rests(door) or door.stream.autotuner.chose_native)):
        turned(door, "read")


def rests(door: Bypass) -> bool:
    """Whether a door's thread runs natively for a backoff that is worth stepping aside for."""
    backoff = door.stream.backoff
    return backoff.until is not None or backoff.left >= LEAST


def _is_alone(door: Bypass) -> bool:
    """Whether nobody but this thread, and threads that are in its context, may have values pending: whoever stands
    aside does not see that he reads one."""
    mine = [each.stream for each in (door, *door.lent)]
    return door.lender is None and all(s.config.mode == "off" or any(s is m for m in mine) for s in STREAMS)
