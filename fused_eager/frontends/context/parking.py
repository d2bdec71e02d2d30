"""Parking: a context that is entered again and again at one place is set aside in between, and not taken down.

What a thread has learned there (whether it rests, and since when; how its streams fared) lives in its front door, and
putting the guards in place takes longer than a small step: torch has to look up its methods again. So from the
`AGAIN`th time in a row on, the door is kept when the context is left, with the guards in place, which do for a thread
in no context what they do where only another thread is in one: nothing. Where no context has been entered there for
`GRACE` seconds, all is taken down as usual; so it is before a fork.

Between two contexts a parked door is on no stack of modes, nothing is pending in its stream, and no thread has been
lent it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable

from ...bounded import Bounded
from ...config import Config
from . import guards
from .intercept import FrontDoor

AGAIN = 4  # contexts in a row at one place, none of them later than
GRACE = 1.0  # seconds after the one before it, until it is parked in between
LOOK = 0.25  # seconds between two looks for what is to be taken down
PLACES = 16  # of each thread

# Whoever pops a door from here may use it, or take it down; one step of the interpreter, so no lock is needed.
_PARKED: dict[int, FrontDoor] = {}
_attendant: threading.Thread | None = None
_clearing = threading.Lock()


class Lot(threading.local):
    """The places where this thread enters contexts: how often in a row, when it left last, and the door if it is
    parked."""

    def __init__(self) -> None:
        self.came: Bounded[Hashable, tuple[int, float]] = Bounded(PLACES)
        self.doors: dict[tuple[Hashable, Config], FrontDoor] = {}


LOT = Lot()


def take(place: Hashable, config: Config) -> FrontDoor | None:
    """The door that was parked where a context is entered, with these options; None if there is none."""
    door = LOT.doors.pop((place, config), None)
    if door is None or _PARKED.pop(id(door), None) is None:
        return None
    return door


def comes_again(place: Hashable) -> bool:
    """A context that was entered at `place` is being left. Whether it is one of many, and is to be parked."""
    now = time.monotonic()
    count, left = LOT.came.get(place, (0, now))
    count = count + 1 if now - left <= GRACE else 1
    LOT.came[place] = count, now
    return count >= AGAIN


def park(door: FrontDoor, place: Hashable, config: Config) -> None:
    """Keep a door whose context has been left, and the guards with it."""
    global _attendant
    if len(LOT.doors) >= PLACES:
        LOT.doors.clear()
    LOT.doors[place, config] = door
    door.parked = time.monotonic()
    _PARKED[id(door)] = door
    if _attendant is None:
        _attendant = threading.Thread(target=_attend, daemon=True, name="fused-eager parking")
        _attendant.start()


def _attend() -> None:
    global _attendant
    while True:
        time.sleep(LOOK)
        clear(time.monotonic() - GRACE)
        if not _PARKED:
            # Whoever parks now has seen that somebody attends, or starts anew: look once more after saying so.
            _attendant = None
            if not _PARKED:
                return
            _attendant = threading.current_thread()


def clear(before: float = float("inf")) -> None:
    """Take down what was parked before then."""
    with _clearing:
        for key, door in list(_PARKED.items()):
            if door.parked <= before and _PARKED.pop(key, None) is not None:
                guards.uninstall()


def _in_child() -> None:
    """The thread that attends does not exist in a forked child, nor does whoever may have held the lock."""
    global _attendant, _clearing
    _attendant, _clearing = None, threading.Lock()


# Before a fork it comes before the guards' own, which finishes what is pending: they are in place for parked doors.
os.register_at_fork(before=clear, after_in_child=_in_child)
