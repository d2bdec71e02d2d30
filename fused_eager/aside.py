"""Aside: where torch alone is faster for whole turns of a loop, the front door leaves torch's stack of modes.

Passing an op on costs as much as a small op itself, so a native stretch of tiny ops is slow as long as the mode is
there. But what is not there sees nothing and has to be called back. A *turn* is what comes round in Python, outside of
any op: an optimizer step, a `sync()`, or, where values are read and neither comes (generating text), a call of the
outermost module. At a turn the front door may step aside, and so many turns of that kind later it returns.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook

from . import run
from .buffers import LOCK
from .pace import Turn
from .reasons import Reason
from .stream import STREAMS

if TYPE_CHECKING:
    from torch.nn import Module

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
        door.calls = Calls(door)


class Calls:
    """Calls of the module that is called first from now on, as turns."""

    def __init__(self, door: FrontDoor):
        self._outermost: weakref.ref[Module] | None = None
        self._hook = register_module_forward_pre_hook(functools.partial(self._called, weakref.ref(door)))

    def _called(self, door: weakref.ref[FrontDoor], module: Module, args: Any) -> None:
        found = door()
        if found is None:
            self.forget()
            return
        if threading.get_ident() != found.stream.thread:
            return
        outermost = self._outermost and self._outermost()
        if outermost is None:
            self._outermost = weakref.ref(module)
        elif outermost is not module:
            return
        turned(found, "call")
        if not (found.aside or _rests(found) or found.stream.pace.chose_native):
            self.forget()
            found.calls = None

    def forget(self) -> None:
        """Look at calls no more."""
        self._hook.remove()


def _rests(door: FrontDoor) -> bool:
    spell = door.stream.spell
    return spell.until is not None or spell.left >= LEAST


def _is_alone(door: FrontDoor) -> bool:
    """Whether nobody but this thread, and threads that are in its context, may have values pending: whoever stands
    aside does not see that he reads one."""
    mine = [each.stream for each in (door, *door.lent)]
    return door.lender is None and all(s.config.mode == "off" or any(s is m for m in mine) for s in list(STREAMS))
