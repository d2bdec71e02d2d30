"""Writes that nobody waits for: one daemon thread, a bounded queue, and a bounded flush at exit."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from fused_eager.cache.exits import call_at_exit
from fused_eager.cache.forks import call_after_fork


class Writer:
    """Runs jobs in order on a thread that starts with the first one. A job handles its own errors.

    At most `max_bytes` wait in the queue; `submit` refuses beyond that rather than hold the program's memory.
    At exit the process waits up to `exit_flush_s` for what is queued.
    """

    def __init__(
        self, max_bytes: int = 512 << 20, exit_flush_s: float = 5.0, name: str = "fused-eager-cache-writer"
    ) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self.exit_flush_s = exit_flush_s
        self._thread: threading.Thread | None = None
        self._reset()
        call_after_fork(self._reset)
        reference = weakref.ref(self)
        call_at_exit(_flush_at_exit, reference)

    def submit(self, size: int, job: Callable[[], None]) -> bool:
        """Queues a job that holds `size` bytes; False when the queue is full or no thread can be started."""
        with self._changed:
            if self._bytes + size > self.max_bytes:
                return False
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is shutting down
                    return False
                self._thread = thread
            self._bytes += size
            self._queue.append((size, job))
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything submitted so far and meanwhile is done; False when that took too long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._queue or self._busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                size, job = self._queue.popleft()
                self._busy = True
            try:
                job()
            finally:
                # also when a job breaks its promise and raises: the thread dies loudly, the next submit starts another
                del job  # what it was to write need not wait for the next one
                with self._changed:
                    self._busy = False
                    self._bytes -= size
                    self._changed.notify_all()

    def _reset(self) -> None:
        # in a forked child too: the parent writes what was queued before the fork
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        self._busy = False
        self._thread = None


def _flush_at_exit(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is not None:
        writer.flush(writer.exit_flush_s)
