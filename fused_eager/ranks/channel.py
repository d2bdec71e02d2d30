"""Short texts by name that all ranks of a job see: keys of the store that the job has anyway.

A store's client waits for its answer without an end, and one client serves one thread at a time. So what is read and
written here has a connection of its own, and `Busy` says since when it has been waiting.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import distributed

from . import sockets


class StoreGone(Exception):
    """The store does not answer any more: whoever held it has ended."""


class Channel:
    """The keys of this library in a job's store.

    `port` is the one that the store listens at, 0 if it is a file. `busy_since` is the time (`time.monotonic`) since
    when a call has been waiting for the store; 0.0: none is.
    """

    def __init__(self, store: Any, seconds: float):
        before = sockets.open_now()
        self._store: Any = distributed.PrefixStore("fused_eager", store.clone())
        self._seconds = max(seconds, 1.0)
        self._store.set_timeout(timedelta(seconds=self._seconds))
        self._lock = threading.Lock()
        found: Any = base(store)
        is_file = isinstance(found, distributed.FileStore)
        self._path: str = found.path if is_file else ""
        self.port: int = 0 if is_file else found.port
        # Other threads open sockets meanwhile: gloo's, and whoever talks to a process that compiles.
        self._socket = {} if is_file else sockets.leading_to(self.port, sockets.since(before))
        self.busy_since = 0.0

    @property
    def holder(self) -> str:
        """Who keeps the store, in words."""
        if self._path:
            return f"the file {self._path}"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "torchrun's agent on the first node"
        return "rank 0"

    @property
    def is_held_by_first(self) -> bool:
        """Whether it ends with the process of rank 0."""
        return self.holder == "rank 0"

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Any]:
        if not self._lock.acquire(timeout=self._seconds):
            raise StoreGone("the store does not answer")
        try:
            if self._store is None:
                raise StoreGone("the job has ended")
            self.busy_since = time.monotonic()
            # torch would print where in its C++ it has failed, and make a new file in the place of one that is gone.
            if sockets.any_closed(self._socket) or (self._path and not os.path.exists(self._path)):
                raise StoreGone("the connection to the store is closed")
            yield self._store
        except (RuntimeError, OSError) as error:
            raise StoreGone(str(error).partition("\n")[0]) from error
        finally:
            self.busy_since = 0.0
            self._lock.release()

    def put(self, name: str, text: str) -> None:
        """Give a name its text.

        Raises:
            StoreGone: the store does not answer.
        """
        with self._calling() as store:
            store.set(name, text)

    def get(self, name: str) -> str:
        """The text of a name; "" where it has none yet. Raises as `put`."""
        with self._calling() as store:
            return store.get(name).decode() if store.check([name]) else ""

    def first(self, name: str, text: str) -> str:
        """Give a name its text unless it has one already; whichever it has then. Raises as `put`."""
        with self._calling() as store:
            return str(store.compare_set(name, "", text).decode())

    def close(self) -> None:
        """Let the store go: a file is removed when all have."""
        if self._lock.acquire(timeout=1.0):
            self._store = None
            self._lock.release()

    def forget(self, name: str) -> None:
        """Take a name away. Raises as `put`."""
        with self._calling() as store:
            store.delete_key(name)


def base(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store
