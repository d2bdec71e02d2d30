"""The one interface that every place for bytes implements, and its errors.

A store maps names `ac/<64 hex>`, `cas/<64 hex>` and `lease/<64 hex>` to bytes. It knows nothing of keys, manifests or
trust. Six operations for bytes and one for leases: few enough that a new backend is an afternoon's work.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

NAME = re.compile(r"(ac|cas|lease)/[0-9a-f]{64}", re.ASCII)

CODES = {
    "full": "no space left, or a quota reached",
    "read-only": "the store cannot be written",
    "denied": "permission or credentials refused",
    "unsafe-directory": "a private directory that others own or can write to",
    "too-large": "the stored bytes exceed the limit that was asked for",
    "busy": "another process held the store's lock for too long",
    "timeout": "no answer in time",
    "unreachable": "the server cannot be reached or closed the connection",
    "server-error": "the server answered with an error",
    "garbage": "the server answered with something that is not the protocol",
    "breaker-open": "too many failures lately: the store is left alone for a while",
    "unsupported": "this kind of store cannot do it",
    "io": "any other failure of the operating system or a library",
}


class StoreError(Exception):
    """A store could not do what was asked. `code` is a row of CODES. Absence is no error: `get` returns None."""

    def __init__(self, code: str, detail: str = "") -> None:
        assert code in CODES, code
        super().__init__(f"{code}: {detail or CODES[code]}")
        self.code = code


@dataclass(frozen=True)
class Stat:
    """`used` is when the entry was last read or written, in seconds since 1970, or 0.0 where the store cannot say."""

    name: str
    size: int
    used: float


class Store(ABC):
    """A place for bytes. Every method raises StoreError only, and may be called from many threads and processes."""

    label = "store"  # for counters and events; never holds credentials

    @abstractmethod
    def get(self, name: str, limit: int) -> bytes | None:
        """The bytes, or None when absent. More than `limit` bytes raise StoreError("too-large")."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Writes or overwrites atomically: a reader sees the old bytes or the new ones, never a mixture."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Removes the name; its absence is fine."""

    @abstractmethod
    def stat(self, name: str) -> Stat | None:
        """Size and last use, or None when absent."""

    @abstractmethod
    def list(self, kind: str) -> Iterator[Stat]:
        """Everything of a kind ("ac", "cas"), in no order. Raises StoreError("unsupported") where it cannot."""

    def exists(self, name: str) -> bool:
        return self.stat(name) is not None

    def quarantine(self, name: str, why: str) -> None:
        """Takes a damaged name out of the way, kept for a look where the store can, else deleted."""
        self.delete(name)

    def swap(self, name: str, expect: bytes | None, data: bytes | None, ttl_s: float) -> bool:
        """Replaces `expect` (None: absent) by `data` (None: delete), for leases only. True when it took place.

        A store may forget the record `ttl_s` seconds after. Here for stores that have no atomic compare-and-set:
        write, let every competitor's write settle, read back; the last writer wins (Fischer's mutual exclusion). Two
        winners are possible when a rival's write takes longer than we wait: they compile twice, nothing else happens.
        """
        began = time.monotonic()
        if self.get(name, 4096) != expect:
            return False
        if data is None:
            self.delete(name)
            return True
        self.put(name, data)
        if expect is not None and data.startswith(expect[:32]):
            return True  # the holder's own heartbeat competes with nobody
        # on a slow store the others are slow too; the random part breaks the rhythm of processes started together
        quiet = min(max(self.quiet_s, 2 * (time.monotonic() - began)), 2.0)
        time.sleep(quiet * (1 + secrets.randbelow(256) / 256))
        return self.get(name, 4096) == data

    quiet_s = 0.1

    def close(self) -> None:  # noqa: B027 - most stores hold nothing open
        """Gives up connections; the store may be used again and opens them anew."""


def checked(name: str) -> str:
    """`name`, which must be one that a store can hold: no other string ever becomes a path or a URL."""
    if not NAME.fullmatch(name):
        raise ValueError(f"not a name in a store: {name!r:.80}")
    return name


def blob_name(data: bytes) -> str:
    return f"cas/{hashlib.sha256(data).hexdigest()}"
