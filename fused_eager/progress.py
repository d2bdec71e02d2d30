"""Nothing waits in silence: what takes longer than a second says what it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST, EVERY = 1.0, 10.0  # seconds


@contextmanager
def waiting(what: str | Callable[[], str], enabled: bool = True) -> Iterator[None]:
    """While the body runs, write `what` and the time it has taken to stderr: after one second, then every ten.

    Where it is a function, that is asked each time.
    """
    if not enabled:
        yield
        return
    started = time.perf_counter()
    done = threading.Event()

    def tell() -> None:
        pause = FIRST
        while not done.wait(pause):
            now = what if isinstance(what, str) else what()
            print(f"fused_eager: {now}, {time.perf_counter() - started:.0f} s so far", file=sys.stderr, flush=True)
            pause = EVERY

    teller = threading.Thread(target=tell, daemon=True, name="fused-eager progress")
    teller.start()
    try:
        yield
    finally:
        done.set()
