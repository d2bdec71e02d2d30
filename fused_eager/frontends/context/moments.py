"""Moments between two ops: where a thread rests and no turn comes, the front door steps aside all the same.

A loop without a read, an optimizer's step or a backward pass has no turn, and from inside an op the door cannot leave
torch's stack of modes, for torch restores it when the op ends. So a thread of ours looks now and then whether the main
thread rests, and asks Python to call us between two of its instructions (`Py_AddPendingCall`, which works for the main
thread alone). Where that turns out to be in the middle of an op, or of our own code, nothing is done and the next look
asks again. In the same way the door comes back when the rest is over.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref

from ...recording.native import nothing_is_pending
from . import bypass, signals, threads
from .intercept import FrontDoor

FIRST, LONGEST = 0.01, 0.5  # seconds between two looks: doubled where nothing has changed, as a look costs some 20 us
AGAIN = 1e-3  # where the last one was in the middle of an op: in a loop of small ops most are
GONE = 2.0  # seconds without a context, after which nobody looks any more

_watched: weakref.ref[FrontDoor] | None = None
_asked = False  # Python has been asked to call, and has not yet
_attendant: threading.Thread | None = None


def watch(door: FrontDoor) -> None:
    """The main thread has entered a context: see to it that its door is out of the way where it rests."""
    global _watched, _attendant
    if not door.stream.config.measures or door.lender is not None:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    _watched, door.came = weakref.ref(door), time.perf_counter()
    if _attendant is None:
        _attendant = threading.Thread(target=_attend, daemon=True, name="fused-eager moments")
        _attendant.start()


def _attend() -> None:
    global _attendant, _asked
    pause, seen, since = FIRST, None, time.monotonic()
    while time.monotonic() - since < GONE:
        time.sleep(pause)
        door = None if _watched is None else _watched()
        if door is not None and door.open:
            since = time.monotonic()
            due = bypass.changes_between_ops(door)
            state = door.bypassed, due
            pause, seen = (min(2 * pause, LONGEST) if state == seen else FIRST), state
            if due:
                pause = AGAIN  # until it is done
                if not _asked:
                    _asked = True
                    ctypes.pythonapi.Py_AddPendingCall(_CALL, None)
        del door
    _attendant = None


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _CALL(_: object) -> int:
    global _asked
    _asked = False
    door = None if _watched is None else _watched()
    if door is None or not door.open or threads.current_door() is not door:
        return 0
    if not signals.is_within(sys._getframe(1)) and nothing_is_pending() and bypass.changes_between_ops(door):
        bypass.between_ops(door)
    return 0


def _in_child() -> None:
    """The thread that attends does not exist in a forked child."""
    global _attendant, _asked, _watched
    _attendant, _asked, _watched = None, False, None


os.register_at_fork(after_in_child=_in_child)
