"""Nothing waits in silence: what takes longer than a second says what it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST, EVERY = 1.0, 10.0  # seconds
# Each says whether it is in vain to wait for what another process makes: a rank is lost, which may be the one, and
# whoever waits has an error to raise.
IN_VAIN: list[Callable[[], bool]] = []
_NOW: dict[int, list[str | Callable[[], str]]] = {}  # what each thread waits for, the innermost last


def is_in_vain() -> bool:
    """Whether nobody shall wait for another process now."""
    return any(says() for says in IN_VAIN)


def doing(thread: int) -> str:
    """What a thread, given by its number, is waiting for now, in words; "" if it is not."""
    found = _NOW.get(thread)
    try:
        what = found[-1] if found else ""
    except IndexError:  # it has ended just now
        return ""
    return what if isinstance(what, str) else what()


@contextmanager
def waiting(what: str | Callable[[], str], enabled: bool = True) -> Iterator[None]:
    """While the body runs, write `what` and the time it has taken to stderr: after one second, then every ten.

    Where it is a function, that is asked each time. Where no thread can be had any more, nothing is written.
    """
    own = threading.get_ident()
    _NOW.setdefault(own, []).append(what)
    try:
        with _told(what, enabled):
            yield
    finally:
        stack = _NOW[own]
        stack.pop()
        if not stack:
            del _NOW[own]


@contextmanager
def _told(what: str | Callable[[], str], enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    done = threading.Event()

    def tell() -> None:
        until(done.wait, what)

    teller = threading.Thread(target=tell, daemon=True, name="fused-eager progress")
    try:
        teller.start()
    except RuntimeError:  # the interpreter ends; or the system has no more threads, and this is no reason to fail
        pass
    try:
        yield
    finally:
        done.set()


def until(done: Callable[[float], bool], what: str | Callable[[], str]) -> None:
    """Wait for `done(seconds)`, which waits so long at most and says whether that was enough, and write as `waiting`
    does. Takes no thread: from Python 3.12 on none begins at the end of a process."""
    started, pause = time.perf_counter(), FIRST
    while not done(pause):
        now = what if isinstance(what, str) else what()
        print(f"fused_eager: {now}, {time.perf_counter() - started:.0f} s so far", file=sys.stderr, flush=True)
        pause = EVERY
