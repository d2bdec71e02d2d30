"""Scratch: memory for large results that is there already.

glibc takes memory of 32 MB and more from the system and gives it back each time; every new page of it is a fault, which
takes longer than most regions need to fill the page. So a region gets one more argument for each large result that no
dying input makes room for, donated and never read: the memory of a result of the same dtype and shape that nobody
refers to any more, or zeros (writing those first, all at once, is still faster than the faults one by one).

A flush collects what has died since the one before. What it does not need is kept for the next ones, but no more than
the last few took: a step of a program may be several of them. Memory that a tensor has taken over is lent: it is the
tensor's, and ours once its storage has died.

XLA itself refuses to write to donated memory that somebody looks at through DLPack, and takes other memory instead.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fused_eager.fusion_rules.deferred import jax, jnp, xla_client
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ...log.events import LOG
from ...xla import device, enable_x64
from ..home import Home, home_of
from .heap import LARGE as LARGE

FLUSHES = 8  # the last so many say how much is kept


class Holder(Protocol):
    """What has a value on the device: a buffer."""

    array: jax.Array | None


class Held:
    """An array, and the storage that has taken over its memory, if one has."""

    __slots__ = ("array", "storage")

    def __init__(self, array: jax.Array, storage: StorageWeakRef | None = None):
        self.array = array
        self.storage = storage

    @property
    def is_lent(self) -> bool:
        """Whether that storage still lives."""
        return self.storage is not None and not self.storage.expired()  # type: ignore[no-untyped-call]

    def is_free(self) -> bool:
        """Whether nothing refers to the memory but this: to be written over without waiting for anybody."""
        # The slot's reference and the call's argument.
        if sys.getrefcount(self.array) > 2 or self.array.is_deleted() or not self.array.is_ready():
            return False
        try:
            self.array.block_until_ready()
        except RuntimeError:  # what it failed with would become the next one's failure
            return False
        return True


class Scratch:
    """What has died, by dtype and shape, and what is lent: arrays of the device of JAX's that `on` returns. Every call
    holds the runtime's lock."""

    def __init__(self, on: Callable[[], Any] = device) -> None:
        self.on = on
        self.asked = False  # before that nobody has a use for what dies
        self.free: defaultdict[Home, list[Held]] = defaultdict(list)
        self.lent: list[Held] = []
        self.taken: deque[Counter[Home]] = deque([Counter()], FLUSHES)  # by each of the last flushes

    def bury(self, buffer: Holder) -> None:
        """The storage of a buffer on the device has died, and so has the value, unless something else refers to it."""
        array = buffer.array
        if self.asked and array is not None and array.nbytes >= LARGE:
            held, buffer.array = Held(array), None
            del array
            self._give(held)

    def lend(self, array: jax.Array, storage: torch.UntypedStorage) -> None:
        """A storage has taken over an array's memory."""
        if self.asked and array.nbytes >= LARGE:
            self.lent.append(Held(array, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]

    def collect(self) -> None:
        """Take back what was lent to storages that have died."""
        held, self.lent = self.lent, []
        if held:
            # A reference that is dropped without Python's lock, as a dying tensor does, waits in jaxlib for this call.
            xla_client._xla.collect_garbage()
        for each in held:
            if each.is_lent:
                self.lent.append(each)
            else:
                self._give(each)

    def _give(self, held: Held) -> None:
        if held.is_free():
            self.free[home_of(held.array)].append(held)

    def take(self, home: Home) -> jax.Array:
        """Memory for one result, to be donated at once."""
        self.asked = True
        self.taken[-1][home] += 1
        free = self.free[home]
        LOG.count("scratch reused" if free else "scratch new")
        return free.pop().array if free else _zeros(home, self.on())()

    def drop(self) -> None:
        """A flush is over: what is more than the last ones took goes back to the system."""
        if self.asked:
            for home, free in list(self.free.items()):
                self.free[home] = free[: sum(taken[home] for taken in self.taken)]
                if not self.free[home]:
                    del self.free[home]
            self.taken.append(Counter())

    def forget(self) -> None:
        """Give everything back, now or as soon as its storage dies."""
        if not (self.asked or self.free or self.lent):
            return  # as where contexts are entered in a loop that compiles nothing
        self.free.clear()
        self.lent.clear()
        self.taken.append(Counter())
        self.asked = False


SCRATCH = Scratch()


@functools.lru_cache(maxsize=64)
def _zeros(home: Home, on: Any) -> Any:
    dtype, shape = home
    with enable_x64(True), jax.default_device(on):
        return jax.jit(lambda: jnp.zeros(shape, JAX_DTYPE[dtype])).lower().compile()
