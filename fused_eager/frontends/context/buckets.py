"""Buckets: what is open for a reducer in a thread, while it looks at gradients from C++ (`reducers`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from ...devices.buffer import LOCK, Buffer
from ...devices.host import trap
from ...devices.host.buffers import TABLE
from ...executing import materialize as materializing
from ...log.reasons import Reason

LOOKS = Reason("sync.memory", "the reducer of DistributedDataParallel looks at gradients")


class HasBuckets(Protocol):
    """A reducer, as its buckets are needed."""

    def buckets(self) -> Iterator[torch.UntypedStorage]:
        """Their memory."""


class _Current(threading.local):
    """What is open in this thread, and for which reducer."""

    def __init__(self) -> None:
        self.opened: list[Buffer] = []
        self.reducer: HasBuckets | None = None
        self.ends_natively = -1  # the backward pass for which this is so


CURRENT = _Current()


def shut() -> None:
    """Close the traps that are open in this thread."""
    CURRENT.reducer = None
    if CURRENT.opened:
        with LOCK:
            for b in CURRENT.opened:
                if TABLE.get(b.cdata) is b:
                    trap.arm(b.storage)
            CURRENT.opened.clear()


def materialize(storages: Iterator[torch.UntypedStorage], reason: Reason = LOOKS) -> None:
    for storage in storages:
        b = TABLE.get(storage._cdata)
        if b is not None:
            materializing.materialize(b, reason)


def pending() -> list[Buffer]:
    """What is open of a reducer's buckets while it runs in this thread, where their values are not in memory yet."""
    reducer = CURRENT.reducer
    found = () if reducer is None else (TABLE.get(storage._cdata) for storage in reducer.buckets())
    return [b for b in found if b is not None]


def finish(reason: Reason) -> None:
    """Have the values of all these in memory. The caller holds the lock."""
    for b in pending():
        materializing.materialize(b, reason)
