"""Aside: where torch alone is faster for whole turns of a loop, the front door leaves torch's stack of modes.

Passing an op on costs as much as a small op itself, so a native stretch of tiny ops is slow as long as the mode is
there. But what is not there sees nothing and has to be called back. A *turn* is what comes round in Python, outside of
any op: an optimizer step, a `sync()`, or, where values are read and neither comes (generating text), a call of the
outermost module. At a turn the front door may step aside, and so many turns of that kind later it returns.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from . import run
from .buffers import LOCK
from .outermost import Calls
from .pace import Turn
from .reasons import Reason
from .stream import STREAMS

if TYPE_CHECKING:
    from .intercept import FrontDoor

READS = 2  # values that are read without another kind of turn until calls of modules are looked at
LEAST = 4  # sync points that a spell has to last to be worth the change


def turned(door: FrontDoor, turn: Turn) -> None:
    """A turn has come: the front door may step aside, or come back. Not from inside an op."""
    if door.aside:
        door.stood_aside(turn)
        return
    door.reads = 0
    stream = door.stream
    if not stream.config.measures or not _is_alone(door):
        return
    rest = stream.pace.rest(turn)
    if rest or _rests(door):
        with LOCK:
            run.hand_over(Reason(stream.spell.code if stream.spell.left else "region.native"))
            door.step_aside(turn, rest)


def read(door: FrontDoor) -> None:
    """A value was read, by an op: if no turn comes that is known of, look for one among the calls of modules."""
    door.reads += 1
    if door.reads > READS and door.calls is None and (_rests(door) or door.stream.pace.chose_native):
        found = weakref.ref(door)
        door.calls = Calls(lambda: _called(found()))


def _called(door: FrontDoor | None) -> bool:
    """A turn of calls has come. Returns whether the next one is of interest too."""
    if door is None:
        return False
    turned(door, "call")
    if door.aside or _rests(door) or door.stream.pace.chose_native:
        return True
    door.calls = None
    return False


def _rests(door: FrontDoor) -> bool:
    spell = door.stream.spell
    return spell.until is not None or spell.left >= LEAST


def _is_alone(door: FrontDoor) -> bool:
    """Whether nobody but this thread, and threads that are in its context, may have values pending: whoever stands
    aside does not see that he reads one."""
    mine = [each.stream for each in (door, *door.lent)]
    return door.lender is None and all(s.config.mode == "off" or any(s is m for m in mine) for s in list(STREAMS))
