"""Buffers: the storages whose current value is not in their memory, and the lock of the runtime.

The value of a buffer is *pending* (a position in a stream) or *on the device* (a JAX array, running or finished). Each
kind of device has a kind of its own; a device's table holds them by the address of their storage.

The table holds storages, never tensors. A storage held by the table alone is dead: `is_alive` asks torch's own
reference count, and `sweep` forgets the dead, so nothing is computed for, or kept by, a tensor that has gone.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

import torch

from .home import Home

if TYPE_CHECKING:
    import jax

use_count = torch._C._storage_Use_Count


class Owner:
    """A stream, in which values are pending. May be referred to weakly although it has slots."""

    __slots__ = ("__weakref__",)


RECENT = 4  # runs whose results are looked at in each further run: most of what dies is as young as that
LOOKED_AT = 16  # buffers that a run pays for, which looks at all of them once in a while
GROWTH = 64  # a part of all bytes: more is not made before all are looked at again,
LITTLE = 1 << 16  # but for so many bytes


class Table(dict[int, "Buffer"]):
    """The buffers of a device, by the address of their storage, and when to look which of them are dead.

    A model has thousands, and in mode `strict` a run is one op: to look at all in each would take longer than the op.
    """

    __slots__ = ("bytes", "made", "recent", "runs")

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[list[int]] = deque(maxlen=RECENT)  # addresses, which keep nothing alive
        self.bytes = 0  # of all, when they were last looked at
        self.made = 0  # bytes since then,
        self.runs = 0  # and runs

    def ran(self, made: list[int], nbytes: int) -> None:
        """A run has made values of the storages at these addresses, and taken so many bytes for it."""
        self.recent.append(made)
        self.made += nbytes

    def brought(self, address: int, nbytes: int) -> None:
        """A value has come from elsewhere since the last run, for the storage at this address."""
        if not self.recent:
            self.recent.append([])
        self.recent[-1].append(address)
        self.made += nbytes
        if self.has_grown:  # a program may do nothing else
            sweep(self)

    @property
    def has_grown(self) -> bool:
        """Whether so much has been made that all are to be looked at."""
        return self.made >= max(self.bytes // GROWTH, LITTLE)


# One lock for the whole runtime: streams flush each other's work, and two locks taken in both orders are a deadlock.
LOCK = threading.RLock()


class Buffer(ABC):
    """A storage and the value it holds now. At most one of `stream` (pending), `array`, `error` says where it is; none
    does where ATen has put it into the storage's own memory while it was being recorded (`recording.shadow`), or where
    nobody has written it yet."""

    table: Table  # its device's

    __slots__ = (
        "__weakref__",
        "array",
        "born_native",
        "cdata",
        "epoch",
        "error",
        "home",
        "maker",
        "origin",
        "previous",
        "storage",
        "stream",
        "vacant",
        "vid",
    )

    def __init__(self, storage: torch.UntypedStorage, born_native: bool):
        self.storage = storage
        self.cdata = storage._cdata
        # Memory that the user may know by address (numpy views, data_ptr): the value must return to that memory.
        self.born_native = born_native
        self.stream: Owner | None = None
        self.epoch = -1
        self.vid = -1
        self.array: jax.Array | None = None
        self.home: Home | None = None
        self.origin: tuple[int, int] | None = None  # (run, value number) that made `array`
        self.maker: int | None = None  # the thread whose ops made the value
        self.error: BaseException | None = None
        self.previous: jax.Array | None = None  # the value to return to if the pending one cannot be computed
        self.vacant = False  # its own memory has gone back to the system

    @property
    def is_at_home(self) -> bool:
        """Whether the value is where it is without us, and counts as one on the device all the same."""
        return self.stream is None and self.array is None and self.error is None

    def is_alive(self, held: int = 0) -> bool:
        """Whether a tensor, or anything but this table and `held` inputs of ours, still refers to the storage."""
        # One C++ reference is the Python object's own; its Python references are self.storage and the call's argument.
        return use_count(self.cdata) > 1 or sys.getrefcount(self.storage) > 2 + held

    @abstractmethod
    def release(self) -> None:
        """Forget the value, whatever it is."""

    @abstractmethod
    def lift(self) -> None:
        """Make an array of the value of a buffer that is at home."""

    @abstractmethod
    def bind(self) -> None:
        """Put the finished value where whoever reads the storage without us finds it. Waits for the device."""

    @abstractmethod
    def bury(self) -> None:
        """Nobody refers to the storage any more."""


def dead(buffers: list[Buffer]) -> list[Buffer]:
    """Those that are not alive, as `is_alive` says: at every flush all are looked at, and a call takes longer."""
    counted = sys.getrefcount
    return [b for b in buffers if not (use_count(b.cdata) > 1 or counted(b.storage) > 2)]


def sweep(table: Table) -> None:
    """Forget the buffers on the device whose storages nobody refers to any more."""
    with LOCK:
        _forget(table, list(table.values()))
        table.bytes, table.made, table.runs = sum([b.storage.nbytes() for b in table.values()]), 0, 0


def sweep_before_run(table: Table) -> None:
    """The same, as far as it pays: of those that the last runs have made, and of all as soon as these are few for the
    runs, or small for the memory, that there have been since."""
    with LOCK:
        table.runs += 1
        if table.runs * LOOKED_AT >= len(table) or table.has_grown:
            sweep(table)
        else:
            _forget(table, [b for made in table.recent for cdata in made if (b := table.get(cdata)) is not None])


def _forget(table: Table, buffers: list[Buffer]) -> None:
    for b in dead([b for b in buffers if b.stream is None]):
        if table.pop(b.cdata, None) is not None:  # else it is there twice
            b.bury()
        # The storage dies with the last reference; until then nobody may read its unwritten memory.


def living(table: Table, pending: bool = False) -> list[Home]:
    """What living tensors have on a device; with `pending`, what is to be computed as well, and is not lost."""
    return [
        b.home
        for b in table.values()
        if b.home is not None and (b.array is not None or (pending and b.error is None)) and b.is_alive()
    ]
