"""Heap: what glibc keeps of freed memory: enough for the next run of a region, and no more.

Memory that is freed and taken again at once should not go to the system in between: each new page is a fault, which
takes longer than most regions need to fill it. glibc learns that by itself, from the largest block that the program
has freed, but never for one above `LARGE`. Here it is taught once for all sizes that it can learn, told to keep what
fits into the heap of a thread (2.36 takes that, older ones refuse), and to keep the last of those when nothing is left
in it. Regions are cut so that their temporaries take less (`planning.temporaries`).

A region's results are allocated by XLA, wait for their turn to be freed among buffers of torch's, and leave gaps that
glibc neither fills nor returns by itself: training a small GPT, the resident set grew by 6 MB in a step, for hundreds
of steps. And a compilation leaves some 100 MB behind. So once in a while the resident set is looked at, and where it
has grown since it was last found settled, `malloc_trim` is called, which takes some milliseconds.

Only what glibc can say and do is asked of it: on other systems nothing happens.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import sys
import time
from collections.abc import Callable

import torch

from ...process import resident

LARGE = 32 << 20  # bytes from which on glibc asks the system each time, by itself (DEFAULT_MMAP_THRESHOLD_MAX)
HEAP = 2 * LARGE  # bytes of one of the heaps that a thread's memory is taken from (HEAP_MAX_SIZE)
LARGEST = HEAP - (4 << 20)  # bytes of a block that fits into one, with something beside it
# What `mallopt` calls the memory to keep at the end of a heap, such a limit, and how many arenas there may be.
_TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -2, -3, -8
EVERY, PART = 2.0, 0.01  # seconds between two looks, at least, and the part of all time that giving back may take
GROWN, ROOM = 1.05, 16 << 20  # so many times what it was, and so many bytes more, is growth
_THRESHOLDS, _ARENAS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max"), ("arena_max", "arena_test")


@functools.cache
def libc(name: str) -> Callable[..., int | None] | None:
    """A function of the C library that returns an address or a number, 0 as None; None where there is no such one."""
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    found.restype = ctypes.c_void_p
    return found  # type: ignore[no-any-return]


@functools.cache
def keep_blocks() -> int:
    """Teach glibc to keep what is freed, as it does in any program that has once freed a block just below `LARGE`.

    A thread's memory comes from heaps of `HEAP` bytes, and where the last one has become empty glibc unmaps it, unless
    that would leave less at the end of the one before than it is asked to keep. Which blocks came to lie alone in a
    heap is luck: a training step of an MLP had 1,500 faults in one process of three, or none.

    Where the user has set any of glibc's thresholds (`MALLOC_MMAP_THRESHOLD_` and the like), nothing is done.

    Returns:
        The bytes from which on a block comes from the system each time, if all is well.
    """
    malloc, free, set_option = libc("malloc"), libc("free"), libc("mallopt")
    if malloc is None or free is None or _is_set_by_user(_THRESHOLDS):
        return LARGE
    free(ctypes.c_void_p(malloc(ctypes.c_size_t(LARGE - 16 * mmap.PAGESIZE))))
    if set_option is None:
        return LARGE
    set_option(_TOP_PAD, HEAP)  # only now: from then on glibc learns nothing
    return LARGEST if set_option(_MMAP_THRESHOLD, LARGEST) else LARGE


@functools.cache
def share_arena() -> None:
    """Have threads that begin from now on take their memory where the main thread does.

    glibc gives each thread an arena of its own, which takes nothing from the others: XLA computes in one of several
    threads, now in this one and then in that, and each arena comes to hold what a step frees; so does the program's, of
    what torch has freed. Called before XLA starts its threads. Where the user has said how many arenas there are to be
    (`MALLOC_ARENA_MAX`), nothing is done.
    """
    set_option = libc("mallopt")
    if set_option is not None and not _is_set_by_user(_ARENAS):
        set_option(_ARENA_MAX, 1)


def unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of memory that nobody has written. A large one comes fresh from the system, which is asked for huge
    pages: 48 MB of small ones are 12,000 faults and take 17 ms, of huge ones 7."""
    t = torch.empty(shape, dtype=dtype)
    if t.nbytes >= LARGE and sys.platform == "linux" and (advise := libc("madvise")) is not None:
        address = t.data_ptr()
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + t.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return t


def _is_set_by_user(names: tuple[str, ...]) -> bool:
    """Whether the environment says so, in either of glibc's two ways (some variables end in an underscore)."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    variables = {name.removesuffix("_") for name in os.environ}
    return any(f"MALLOC_{t.upper()}" in variables or f"glibc.malloc.{t}" in tunables for t in names)


def give_back() -> None:
    """Return to the system what is free, of all sizes and threads."""
    trim = libc("malloc_trim")
    if trim is not None:
        trim(0)


class Watch:
    """Looks now and then whether the resident set has grown, and gives back what is free if it has.

    What was given back and is needed has come back by the next look. But so has what only that moment needed, a step
    that ran for the first time perhaps: so it is given back again, until that makes no difference any more.
    """

    def __init__(self) -> None:
        self.looked = 0.0
        self.began, self.spent = time.monotonic(), 0.0  # seconds that giving back has taken since then
        self.every = EVERY
        self.needed = 0.0  # bytes that are needed, as far as is known
        self.given = True  # back at the last look (or as good as that: the first one says what is needed)
        self.stirred = False

    def stir(self) -> None:
        """Memory has been used in another way than it will be: what that has left is given back at the next look."""
        self.stirred = True

    def turn(self) -> None:
        """From here on it is used in another way: what is left is given back before that takes its own."""
        self.stirred = True
        if self.spent <= PART * (time.monotonic() - self.began):
            self.looked = -math.inf
            self.look()

    def look(self) -> bool:
        """Called as often as anybody likes. Returns whether memory was given back."""
        now = time.monotonic()
        again = self.given and not self.stirred  # which ends by itself, however long giving back takes
        if now - self.looked < (EVERY if again else self.every):
            return False
        self.looked, here = now, resident()
        if self.stirred:
            gives, self.needed = True, math.inf
        elif self.given:
            gives, self.needed = _exceeds(self.needed, here), here
        elif gives := _exceeds(here, self.needed):
            self.needed = here
        self.given, self.stirred = gives, False
        if gives:
            give_back()
            took = time.monotonic() - now
            self.spent += took
            self.every = max(EVERY, took / PART)
        return gives


def _exceeds(more: float, less: float) -> bool:
    return more > GROWN * less + ROOM


WATCH = Watch()
