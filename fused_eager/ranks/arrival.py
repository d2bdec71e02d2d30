"""Ranks that come to make a group: all of this attempt, and none of one before.

torchrun starts ranks again with the store of the attempt before, and what that has left there: gloo would connect to
processes that have gone. So each rank comes with a number nobody has had, the first one lists the numbers of all, each
says that it has found its own in the list, and the first one says that all have. Only the living can.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from datetime import timedelta
from typing import Any

from torch import distributed

from ..config import resolve
from ..progress import EVERY
from .channel import Channel, StoreGone
from .faults import Fault
from .job import is_shared, refuse_if_failed


def meet(store: Any, ranks: list[int], own: int, timeout: timedelta) -> str:
    """Wait until all ranks of a group have come to make it.

    Arguments:
        store: the group's own part of the store.
        ranks: the group's ranks, by their numbers in the job.
        own: which of them this is.
        timeout: the group's.

    Returns:
        A name that only these processes know, for what they put into the store.

    Raises:
        RankLost: one has not come in time, or is lost.
    """
    if len(ranks) < 2 or not is_shared(store):
        return "alone"
    options = resolve()
    limit = timeout.total_seconds()
    seconds = min(options.arrival, limit) if options.heartbeat else limit
    where = "waits in new_group" if distributed.is_initialized() else "waits in init_process_group"
    meeting = _Meeting(Channel(store, seconds), ranks, own)
    began, told, pause = time.monotonic(), 0.0, 0.002
    try:
        meeting.come()
        while True:
            name = meeting.lead() if own == ranks[0] else meeting.follow()
            if name:
                return name
            refuse_if_failed(where)
            waited = time.monotonic() - began
            if waited > seconds:
                raise _fault(meeting.missing(), waited).error(own, where)
            if options.progress and waited > 1.0 and waited - told > EVERY * bool(told):
                told = waited
                text = f"rank {own}: waiting for {_who(meeting.missing())} to make the process group"
                print(f"fused_eager: {text}, {waited:.0f} s so far", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
    except StoreGone as error:
        gone = Fault("store", None, f"the store by which ranks find each other ({meeting.channel.holder}) has gone")
        raise gone.error(own, where) from error


class _Meeting:
    """One rank's part: what it has read and said."""

    def __init__(self, channel: Channel, ranks: list[int], own: int):
        self.channel, self.ranks, self.own = channel, ranks, own
        self.number = secrets.token_hex(8)
        self.list = ""

    def come(self) -> None:
        self.channel.put(f"come/{self.own}", self.number)

    def _name(self) -> str:
        return hashlib.sha256(self.list.encode()).hexdigest()[:16]

    def lead(self) -> str:
        """List all who have come, and see who has found itself there; the name once all have."""
        numbers = {str(rank): self.channel.get(f"come/{rank}") for rank in self.ranks}
        if not all(numbers.values()):
            return ""
        text = json.dumps(numbers)
        if text != self.list:
            self.list = text
            self.channel.put("list", text)
        name = self._name()
        if any(self.channel.get(f"found/{rank}") != name for rank in self.ranks[1:]):
            return ""
        self.channel.put("all", name)
        return name

    def follow(self) -> str:
        """Look for this rank in the list; the name once all have."""
        text = self.channel.get("list")
        if not text or json.loads(text).get(str(self.own)) != self.number:
            return ""
        if text != self.list:
            self.list = text
            self.channel.put(f"found/{self.own}", self._name())
        return self._name() if self.channel.get("all") == self._name() else ""

    def missing(self) -> list[int]:
        """Who has not come, as far as this rank can know."""
        absent = [rank for rank in self.ranks if not self.channel.get(f"come/{rank}")]
        if absent or not self.list:
            return absent or [self.ranks[0]]
        others = [rank for rank in self.ranks[1:] if rank != self.own]
        return [rank for rank in others if self.channel.get(f"found/{rank}") != self._name()] or [self.ranks[0]]


def _who(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _fault(ranks: list[int], seconds: float) -> Fault:
    text = f"not come to make the process group in {seconds:.0f} s"
    if len(ranks) == 1:
        return Fault("missing", ranks[0], f"has {text}")
    return Fault("missing", None, f"{_who(ranks)} have {text}")
