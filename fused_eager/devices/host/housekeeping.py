"""What is done for the host's memory around the runs of regions, also where the CPU stands in for another device."""

from __future__ import annotations

from collections.abc import Callable

from ..buffer import Buffer
from ..device import Housekeeping
from . import free, heap, release_pages
from .scratch import SCRATCH, Scratch


class HostHousekeeping(Housekeeping):
    """glibc's heap, scratch memory, and pages that hold nothing."""

    def __init__(self, scratch: Scratch = SCRATCH) -> None:
        self.scratch = scratch

    @property
    def room(self) -> int | None:
        """Five eighths of what glibc keeps, for XLA may take more."""
        return heap.keep_blocks() * 5 // 8

    def lacks(self, needed: int) -> int | None:
        """As the system says, asked where much is needed."""
        return free.lacks(needed) if needed > free.ASKED else None

    def wastes(self, needed: int, plain: int) -> bool:
        """Where it is much, and more than ATen would take if it let go of nothing."""
        return needed > free.ASKED and needed > free.WASTE * plain

    def loaded(self) -> None:
        """glibc is taught to keep what runs free."""
        heap.keep_blocks()

    def before_run(self) -> None:
        """What has died becomes scratch memory."""
        self.scratch.collect()

    def after_run(self) -> None:
        """Scratch memory that the last runs had no use for goes back."""
        self.scratch.drop()

    def begin(self) -> None:
        """Regions are about to be compiled: XLA starts its threads, which are to share the program's memory."""
        heap.share_arena()

    def compiled(self, long: bool) -> None:
        """What is free goes back to the system, at once or at the next look."""
        if long:
            heap.give_back()
        heap.WATCH.stir()

    def turn(self) -> None:
        """What is free goes back before that takes its own."""
        heap.WATCH.turn()

    def forget(self) -> None:
        """Keep no scratch memory: torch alone goes on."""
        self.scratch.forget()

    def look(self, is_needed: Callable[[Buffer], bool], wait: Callable[[], None]) -> None:
        """Free memory, and pages whose values have long been elsewhere, go back to the system."""
        heap.WATCH.look()
        release_pages.WATCH.look(is_needed, wait)


HOUSEKEEPING = HostHousekeeping()
