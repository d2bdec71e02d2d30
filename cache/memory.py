"""The fastest tier: a bounded dictionary in this process, least recently used out first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from fused_eager.cache.forks import call_after_fork
from fused_eager.cache.store import Stat, Store, StoreError, checked


class MemoryStore(Store):
    """At most `max_bytes` of content. A value larger than that is not kept, which is no error: this tier forgets."""

    def __init__(self, max_bytes: int = 256 << 20, label: str = "memory") -> None:
        self.label = label
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._data: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0
        call_after_fork(self._after_fork)

    def get(self, name: str, limit: int) -> bytes | None:
        with self._lock:
            found = self._data.get(checked(name))
            if found is None:
                return None
            self._data[name] = (found[0], time.time())
            self._data.move_to_end(name)
        if len(found[0]) > limit:
            raise StoreError("too-large", f"{name} has {len(found[0])} bytes")
        return found[0]

    def put(self, name: str, data: bytes) -> None:
        with self._lock:
            self._drop(checked(name))
            if len(data) > self.max_bytes:
                return
            self._data[name] = (bytes(data), time.time())
            self._bytes += len(data)
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._data)))

    def delete(self, name: str) -> None:
        with self._lock:
            self._drop(checked(name))

    def stat(self, name: str) -> Stat | None:
        with self._lock:
            found = self._data.get(checked(name))
        return None if found is None else Stat(name, len(found[0]), found[1])

    def list(self, kind: str) -> Iterator[Stat]:
        with self._lock:
            found = [Stat(name, len(data), used) for name, (data, used) in self._data.items()]
        return (stat for stat in found if stat.name.startswith(f"{kind}/"))

    def swap(self, name: str, expect: bytes | None, data: bytes | None, ttl_s: float) -> bool:
        with self._lock:
            found = self._data.get(checked(name))
            if (None if found is None else found[0]) != expect:
                return False
            self._drop(name)
            if data is not None:
                self._data[name] = (data, time.time())
                self._bytes += len(data)
            return True

    def _drop(self, name: str) -> None:
        found = self._data.pop(name, None)
        if found is not None:
            self._bytes -= len(found[0])

    def _after_fork(self) -> None:
        # another thread may have held the lock at the fork, half way through a change: start with nothing
        self._data, self._bytes = OrderedDict(), 0
        self._lock = threading.Lock()
