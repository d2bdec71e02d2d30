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
_FULL = Reason("sync.island", "a bucket of DistributedDataParallel is full")


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


def finish_buckets() -> None:
    """A collective starts while a reducer runs: what follows it may be done in another thread, as in hooks that
    compress, so all of the reducer's buckets are finished first."""
    reducer = CURRENT.reducer
    if reducer is not None:
        with LOCK:
            materialize(reducer.buckets(), _FULL)
