"""Whether all ranks of a group are about to run the same program, with the same collectives inside.

The collectives over some devices are numbered, on each rank in the same order. Before a rank runs several as one
program it tells the others the digest of that, under the number of the first, and asks for theirs. Where all are equal
each of them runs it. Where one differs, all run their collectives one by one, which needs no more than the order. A
rank that runs one by itself says so under its number, so that nobody waits for what will not come.
"""

from __future__ import annotations

import time

from ..errors import FusedEagerError
from .channel import StoreGone
from .heartbeat import Heartbeat

ALONE = "alone"
KEPT = 4096  # numbers whose texts stay in the store: no rank is so far behind, since collectives wait for each other
_LOOK, _SELDOM = 0.0002, 0.01  # seconds


class Agreement:
    """One rank's part in it, for the collectives over some devices."""

    def __init__(self, beat: Heartbeat, devices: str, rank: int, size: int):
        self.beat, self.name, self.rank, self.size = beat, f"joint/{devices}", rank, size
        self.number = 0  # of the next collective
        self.forgotten = 0  # the texts for the numbers before this one have been taken away

    def alone(self, count: int = 1) -> None:
        """The next collectives run one by one."""
        for _ in range(count):
            self._tell(ALONE)

    def reached(self, digest: str, count: int) -> bool:
        """Whether all ranks run their next `count` collectives as one program that has this digest.

        Raises:
            RankLost: a rank that has not told yet is lost.
            FusedEagerError: the store by which ranks tell is gone.
        """
        first, where = self.number, "is about to run a region with collectives inside"
        try:
            self._tell(digest)
            told = [self._asked(first, rank) for rank in range(self.size) if rank != self.rank]
        except StoreGone as gone:  # what the others do is not known, so nothing may be launched
            raise self.beat.error_of(where) or FusedEagerError(f"rank {self.beat.rank} {where}: {gone}") from gone
        if self.beat.fault is not None:
            raise self.beat.error(where)
        together = all(text == digest for text in told)
        if together:
            self.number += count - 1
        else:
            self.alone(count - 1)
        self._forget(first)
        return together

    def _tell(self, text: str) -> None:
        self.beat.channel.put(f"{self.name}/{self.number}/{self.rank}", text)
        self.number += 1

    def _asked(self, number: int, rank: int) -> str:
        pause = _LOOK
        while self.beat.fault is None:
            text = self.beat.channel.get(f"{self.name}/{number}/{rank}")
            if text:
                return text
            time.sleep(pause)
            pause = min(2 * pause, _SELDOM)
        return ALONE

    def _forget(self, before: int) -> None:
        """All have told what they do at a number, so none asks for one that is long before it."""
        for number in range(self.forgotten, before - KEPT):
            self.beat.channel.forget(f"{self.name}/{number}/{self.rank}")
        self.forgotten = max(self.forgotten, before - KEPT)
