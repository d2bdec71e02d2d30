"""Bypass: where torch alone is faster for whole turns of a loop, the front door leaves torch's stack of modes.

Passing an op on costs as much as a small op itself, so a native segment of tiny ops is slow as long as the mode is
there. But what is not there sees nothing and has to be called back: at a *turn* (`policy.alone`) the front door may
leave, and at a later one it returns. Whether and until when is the `policy.Policy`'s to say; how it is done is here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import follower, quiet
from ...devices.buffer import LOCK
from ...devices.host.heap import WATCH
from ...executing.materialize import hand_over
from ...log.reasons import Reason
from ...policy.alone import LOOKED_AT, Turn
from ...policy.policy import Policy
from ...policy.times import Place
from ...recording.rounds import Rounds
from ...tracing.stream import STREAMS, Stream
from . import entered

if TYPE_CHECKING:
    from typing_extensions import Self  # torch's; typing has it from Python 3.11 on

READS = 2  # values that are read without another kind of turn until reads are taken for one
GLANCE = 4e-3  # seconds apart: turns that come faster are counted, and not looked at, as a look takes some 15 us


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
        # While it is bypassed:
        self._looks = 0
        self.blind_until = 0.0  # till then turns need not be looked at
        self._below: list[TorchDispatchMode] | None = None  # the modes that were below
        self.between = False  # it left between two ops, and comes back so if no turn comes
        self.carried = 0.0  # till when it is, if that was found out at a turn: contexts that follow do not end it
        self.rounds = Rounds()  # of a loop that has no turns,
        self.came = 0.0  # and when it was entered, or came back last in one

    @property
    def policy(self) -> Policy:
        """Who runs the ops of its thread."""
        return self.stream.policy

    def rounds_are_told(self) -> None:
        """Something else tells the rounds of the program's loop apart than its ops."""
        self.policy.count_round(0)
        self.rounds.over()

    def someone_is_bypassed(self) -> bool:
        """Whether this one is bypassed, or one of those in whose name it is there: a thread may start threads."""
        return self.bypassed or (self.lender is not None and self.lender.someone_is_bypassed())

    def begin_bypass(self, turn: Turn, until: float) -> None:
        """Leave this thread's stack of modes until then, and for as long as it is to run natively in any case.
        Nothing may be pending in its stream.
        """
        modes = quiet.stack()
        if self in modes:
            self.policy.alone.pass_on(False)
            self.carried = 0.0 if turn == "entry" else until
            self._leave_out(modes[: modes.index(self)], turn, until)
            quiet.restack([mode for mode in modes if mode is not self])

    def _leave_out(self, below: list[TorchDispatchMode], turn: Turn, until: float) -> None:
        self._below, self.bypassed, self._looks = below, True, 0
        self.policy.bypass(turn, until)
        for kind in self.unseen:
            self.unseen[kind] = 0
        follower.overlooked()

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
        """A turn has ended: time to come back, or not."""
        now = time.perf_counter()
        self.unseen["read"] += follower.overlooked()
        turns, self.unseen[turn] = 1 + self.unseen[turn], 0
        if self.policy.end_turn_bypassed(turn, turns, now):
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

    def _return(self) -> None:
        self._below, self.bypassed, self.between = None, False, False
        self._overlook(0.0)
        self.unseen["read"] += follower.overlooked()
        self.policy.resume(self.unseen[self.policy.alone.turns.kind])

    def __enter__(self) -> Self:
        entered.enters(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._below is not None:
            quiet.restack([*quiet.stack(), self])  # on top, from where it is taken
            self._return()
        self.policy.alone.pass_on(False)
        super().__exit__(*error)
        entered.has_left(self)


def enter(door: Bypass, place: Place, again: bool) -> None:
    """Enter the context at `place`: where torch alone was faster for all of it, the front door is aside from the first
    op on. If the context comes `again` and again it goes on as the one before ended: aside, or resting. (Else a rest
    needs turns: there may be none before the end.)"""
    if door.stream.config.measures:
        until = door.policy.enter(place, door.carried if again else 0.0)
        if (time.perf_counter() < until or (again and door.policy.rests_long)) and _is_alone(door):
            hand_over(Reason(door.policy.reason))
            door.enter_bypassed(until)
            return
    door.__enter__()


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
    policy = door.policy
    if not door.stream.config.measures or policy.autotuner.stepping:
        return
    if turn in ("step", "sync"):
        policy.alone.end_turn(turn, None)
    if not _is_alone(door):
        return
    until = policy.end_turn(turn)
    if until or policy.rests_long:
        _leave(door, turn, until)


def passed_backward(door: Bypass) -> None:
    """A backward pass has ended. A thread that rests leaves what follows to torch alone, up to the next turn."""
    door.rounds_are_told()
    if door.bypassed:
        if door.policy.alone.turns.kind in ("entry", "backward"):
            turned(door, "backward")
        return
    inside = torch._C._current_graph_task_id() != -1
    rests = door.policy.rests_long and door.stream.config.measures
    if not inside and rests and door in quiet.stack() and _is_alone(door):
        _leave(door, "entry", 0.0)


def changes_between_ops(door: Bypass) -> bool:
    """Whether a thread without a turn rests, or its rounds are natively faster, and its door is there; or that is over,
    and it is not."""
    if door.bypassed:
        return door.between and not door.policy.backoff.is_on() and door.policy.alone.is_over
    return door.policy.bypasses_rounds


def between_ops(door: Bypass) -> None:
    """The program is between two of its own lines, with nothing pending, where something `changes_between_ops`: the
    door leaves what follows to torch alone, or goes on recording."""
    if door.bypassed:
        door.come_back()
        door.rounds.align()
        door.came = time.perf_counter()
    elif door not in quiet.stack() or not door.stream.config.measures or door.policy.autotuner.stepping:
        return
    elif _is_alone(door):
        _leave(door, "entry", door.policy.bypass_rounds(door.came))
        door.between = door.bypassed


def _leave(door: Bypass, turn: Turn, until: float) -> None:
    with LOCK:
        hand_over(Reason(door.policy.reason))
        door.begin_bypass(turn, until)


def read(door: Bypass) -> None:
    """The program has read a value, and has it: where no other turn comes, this is one."""
    door.reads += 1
    door.rounds_are_told()
    policy = door.policy
    if policy.autotuner.stepping:
        return  # an optimizer reads for itself
    if not door.bypassed:
        policy.alone.end_turn("read", policy.autotuner.after)
    if door.bypassed or (door.reads > READS and policy.may_bypass):
        turned(door, "read")


def _is_alone(door: Bypass) -> bool:
    """Whether nobody but this thread, and threads that are in its context, may have values of the host's pending:
    whoever stands aside does not see that he reads one."""
    mine = [each.stream for each in (door, *door.lent)]
    there = [s for s in STREAMS if s.device.has_memory and s.config.mode != "off"]
    return door.lender is None and all(any(s is m for m in mine) for s in there)
