"""Leaving: at the end of a process, what has run has succeeded, or it ends in failure; and XLA's threads let go of the
program's memory before the interpreter is taken down.

A value that torch gave to XLA is freed by the thread of XLA's that has read it last, and torch takes Python's lock for
that. Where the interpreter is at its end by then, Python ends the thread, which C++ answers by aborting the process: a
training that is over and done would have failed.
"""

from __future__ import annotations

import functools
import os
import threading
import time

from fused_eager.cache.exits import call_at_exit, fail_at_exit, note_codes

from ...executing.deferred_checks import DEFERRED, untold, wait
from ...log.events import LOG
from ...ranks import job, multi_controller

PAUSE, QUIET, LONGEST = 0.005, 3, 0.5  # seconds; how many pauses in a row in which nobody computes; seconds in all


@functools.cache
def arrange() -> None:
    """Have it done at the end of this process."""
    call_at_exit(_leave, os.getpid())
    note_codes()


def _leave(process: int) -> None:
    """Wait for what runs, tell of a failed check that nobody has been told of, and leave Python's lock to whoever wants
    it after that."""
    if not DEFERRED.serial or os.getpid() != process:  # a forked child has no threads of XLA's
        return
    if multi_controller.has_joined() and job.is_lost():  # what runs may be a collective with a rank that is not there
        return
    try:
        wait()
        if (failed := untold()) is not None:
            fail_at_exit(failed)
    except Exception as error:  # the program has ended without asking for that value
        LOG.count(f"failed at the end: {type(error).__name__}")
    quiet, limit = 0, time.monotonic() + LONGEST
    while quiet < QUIET and time.monotonic() < limit:
        time.sleep(PAUSE)
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    """Whether another thread of this process is computing, or is about to; False where that cannot be known."""
    own = str(threading.get_native_id())
    try:
        for name in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{name}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if name != own and state in "RD":
                return True
    except OSError:  # not on Linux, or a thread that has just ended
        pass
    return False

