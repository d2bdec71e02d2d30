"""What keeps a slow or dead store from slowing the program: deadlines, and a breaker that stops asking.

A store's own time-outs are not enough: a server that sends one byte a second, a hung NFS mount or a library's retries
pass them all. So an operation on a store that may hang runs on a thread of its own and is abandoned at its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fused_eager.cache.forks import call_after_fork
from fused_eager.cache.store import StoreError

T = TypeVar("T")

# failures of the store itself; a full disk or a refused write says nothing about reading
BREAKING = frozenset({"timeout", "unreachable", "server-error", "garbage", "io", "busy"})
MAX_STUCK = 4  # abandoned threads that still wait for one store


class Breaker:
    """Opens after `failures` in a row; then, after pauses that double up to `max_pause_s`, lets one attempt through."""

    def __init__(
        self,
        failures: int = 3,
        pause_s: float = 10.0,
        max_pause_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = failures
        self.pause_s = pause_s
        self.max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._row = 0
        self._pause = pause_s
        self._open_until: float | None = None
        call_after_fork(self._after_fork)

    @property
    def is_open(self) -> bool:
        """True while attempts are refused; asking changes nothing."""
        return self._open_until is not None and self._clock() < self._open_until

    def allow(self) -> bool:
        """Whether an attempt may be made now; `succeeded` or `failed` must follow a True."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._clock() < self._open_until:
                return False
            self._open_until = self._clock() + self._pause  # one probe; the others wait for its outcome
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._row, self._pause, self._open_until = 0, self.pause_s, None

    def failed(self) -> None:
        with self._lock:
            self._row += 1
            if self._row >= self.failures:
                if self._row > self.failures:
                    self._pause = min(self._pause * 2, self.max_pause_s)
                self._open_until = self._clock() + self._pause

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


class Guard:
    """Runs operations of one store: `call(work, timeout_s)` returns its value or raises StoreError, in time.

    With `threads=False` (memory, a local disk) the work runs in the caller's thread and the deadline is not enforced.
    """

    def __init__(self, label: str, *, threads: bool, breaker: Breaker | None = None) -> None:
        self.label = label
        self.threads = threads
        self.breaker = breaker if breaker is not None else Breaker()
        self._stuck: set[threading.Thread] = set()
        call_after_fork(self._after_fork)

    def call(self, work: Callable[[], T], timeout_s: float, *, background: bool = False) -> T:
        """`background` says that the caller's thread may wait: it then does where no thread can be had any more."""
        if not self.breaker.allow():
            raise StoreError("breaker-open", f"{self.label} is left alone for a while after failures")
        try:
            result = self._run(work, timeout_s, background) if self.threads else work()
        except StoreError as error:
            if error.code in BREAKING:
                self.breaker.failed()
            else:
                self.breaker.succeeded()
            raise
        except Exception as error:
            # a backend's library raised what the backend did not foresee: still a value, not the user's problem
            self.breaker.failed()
            raise StoreError("io", f"{type(error).__name__}: {error}"[:300]) from error
        except BaseException:
            self.breaker.failed()  # Ctrl-C ends a probe without an outcome
            raise
        self.breaker.succeeded()
        return result

    def _run(self, work: Callable[[], T], timeout_s: float, background: bool) -> T:
        self._stuck = {thread for thread in self._stuck if thread.is_alive()}
        if len(self._stuck) >= MAX_STUCK:
            raise StoreError("timeout", f"{MAX_STUCK} operations on {self.label} still hang")
        results: list[T] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # handed to the waiting thread, which raises it
                errors.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=run, name=f"fused-eager-{self.label}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # out of threads, or the interpreter is shutting down
            if background:
                return work()
            raise StoreError("timeout", str(error)) from error
        if not done.wait(timeout_s):
            self._stuck.add(thread)
            raise StoreError("timeout", f"no answer from {self.label} in {timeout_s:g} s")
        if errors:
            raise errors[0]
        return results[0]

    def _after_fork(self) -> None:
        self._stuck = set()
