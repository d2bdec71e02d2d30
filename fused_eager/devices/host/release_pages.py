"""Vacating: memory whose value has gone to the device goes back to the system. Its addresses stay.

A storage that had memory before it became pending keeps it, for the program may know the address and the value returns
there. So a loop that trains, and never reads what it trains, has it twice: a ResNet-18 with momentum takes 89 MB more
than eager's 315. The pages under a storage whose value has been on the device for a while are therefore given back;
they come again, empty, when the value is bound.

Whoever reads such memory by an address that torch knows nothing of finds zeros meanwhile, instead of what was there
before the first op. What torch knows of is left alone: storages to which a second tensor refers (DLPack needs one), and
those that never wait for a value at all (`recording.native.is_volatile`: torch marks what NumPy has a view of).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from ...log.events import LOG
from ..buffer import Buffer, use_count
from ..home import nbytes_of
from ..storage import storage_of
from . import trap
from .buffers import TABLE, HostBuffer
from .heap import libc

# With a GPU's driver in the process memory may be pinned: it knows the pages and writes there, whatever lies there now.
DRIVERS = ("libcuda.so", "libamdhip64.so", "libze_loader.so")
EVERY = 2.0  # seconds between two looks; a value that was on the device at both has been there for a while
_MAPS = Path("/proc/self/maps")
LEAST = 1 << 20  # bytes of a storage that are worth it


class Watch:
    """Looks now and then for values that have been on the device since it looked last."""

    def __init__(self) -> None:
        self.looked = 0.0
        self.away: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def look(self, is_needed: Callable[[Buffer], bool], wait: Callable[[], None]) -> None:
        """Called as often as anybody likes, with the runtime's lock. As `Device.look`."""
        now = time.monotonic()
        if now - self.looked < EVERY:
            return
        self.looked = now
        away = [b for b in TABLE.values() if _may_go(b)]
        long = [b for b in away if b in self.away and not is_needed(b)]
        if long and _is_mapped(DRIVERS):
            away = long = []
        self.away = weakref.WeakSet(away)
        if long:
            wait()  # what reads the memory of a value that was native then may still run
            LOG.count("storages given back", sum(give_back(b) for b in long))


WATCH = Watch()


def _is_mapped(files: tuple[str, ...]) -> bool:
    """Whether one of these files is mapped; True where nobody can tell."""
    try:
        text = _MAPS.read_text()
    except OSError:
        return True
    return any(file in text for file in files)


def _may_go(b: Buffer) -> bool:
    """Whether a buffer's storage has memory that holds nothing and that nobody else refers to."""
    if b.array is None or b.home is None or b.vacant or not b.born_native:
        return False
    nbytes = b.storage.nbytes()  # all of it has to come back with the value
    return LEAST <= nbytes == nbytes_of(b.home) and _references(b) == _alone()


def _references(b: Buffer) -> tuple[int, int]:
    """To a buffer's storage, by torch and by Python."""
    return use_count(b.cdata), sys.getrefcount(b.storage)


@functools.cache
def _alone() -> tuple[int, int]:
    """The same of a storage that one tensor refers to; Python's depend on how torch keeps its objects."""
    t = torch.empty(1)
    return _references(HostBuffer(storage_of(t), born_native=True))


def give_back(b: Buffer) -> bool:
    """Give the pages that lie in a buffer's storage back to the system. Returns whether it took them."""
    b.vacant = True  # whatever comes of it, it is not tried again
    address, advise = trap.address_of(b.storage), libc("madvise") if sys.platform == "linux" else None
    if not address or advise is None:
        return False
    end = address + b.storage.nbytes()
    assert b.array is not None
    if address <= b.array.unsafe_buffer_pointer() < end:
        return False  # no region returns the memory that it was given; if one did, this would be the value
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
    return not advise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
