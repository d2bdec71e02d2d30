"""What the ranks of one process share of a group: its collectives by number, and what is sent between two; and the work
of a collective, which lets the other ranks run while it is waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C import _distributed_c10d as c10d

from ...errors import FusedEagerError
from ...ranks import status
from ...ranks.turns import Rank, Turns, mine
from .combined import Given, Got

Tensor = torch.Tensor


@dataclass(slots=True)
class Call:
    """One collective of a group, which its ranks come to one by one."""

    words: str
    line: str
    first: int
    given: dict[int, Given] = field(default_factory=dict)
    got: Got | None = None
    error: str = ""

    def take(self, rank: int) -> list[Tensor] | None:
        """What a rank of the group gets. Nothing holds it any more, so that each rank may reuse the memory, and all
        have the same regions."""
        assert self.got is not None
        got, self.got[rank] = self.got[rank], None
        return got


@dataclass(slots=True)
class Board:
    """What the ranks of a group share: its collectives by number, and what is sent between two, by both and the tag."""

    ranks: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    mail: dict[tuple[int, int, int], dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))


class Boards:
    """The boards of all groups of this process: the n-th group that a rank makes under a name is the n-th of all."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...], int], Board] = {}
        self._times: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)

    def of(self, rank: int, name: str, ranks: tuple[int, ...]) -> Board:
        """The one that a rank shares from now on, of a group that it makes."""
        time_ = self._times[rank, name, ranks]
        self._times[rank, name, ranks] += 1
        return self._made.setdefault((name, ranks, time_), Board(ranks))


def here() -> tuple[Turns, Rank]:
    at = mine()
    if at is None:
        raise FusedEagerError(
            "a collective was called in a thread that is no rank: the ranks of this process are threads, and each "
            "calls its collectives itself. A program that needs more threads for them (async_save) runs under torchrun"
        )
    return at


class WorkWithin(c10d.Work):
    """The work of a collective: whoever waits for it lets the other ranks run.

    Arguments:
        ready: whether every rank has done its part.
        finish: gives this rank what is its own; raises what has failed.
        whom: the ranks whose part is missing.
    """

    _kept: ClassVar[set[WorkWithin]] = set()  # C++ may hold its own half alone

    def __init__(
        self, called: str, ready: Callable[[], bool], finish: Callable[[float], list[Tensor]],
        whom: Callable[[], Sequence[int]], source: Callable[[], int] = lambda: -1,
    ):  # fmt: skip
        super().__init__()
        self._ready, self._finish, self._whom, self._source = ready, finish, whom, source
        self._where = f"waits in {called} at {status.place(thread=threading.get_ident()).line}"
        self._results: list[Tensor] | None = None
        self._error: BaseException | None = None
        self._kept.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the others run until all have done their part. (That nobody can is known, so no time has to be over.)

        Raises:
            RankLost, CollectivesDiffer: a part will never be done.
            RuntimeError: what combining the parts has failed with.
        """
        if self._error is not None:
            raise self._error
        if self._results is None:
            turns, me = here()
            began = time.monotonic()
            try:
                turns.wait_until(me, self._ready, self._where, self._whom)
                with torch.no_grad():
                    self._results = self._finish(time.monotonic() - began)
            except RuntimeError as error:
                self._error = error
                raise
            finally:
                self._kept.discard(self)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would not have to wait; then the results are where they belong. The others run once, so that
        who asks again and again is answered."""
        if self._results is None and self._error is None and not self._ready():
            turns, me = here()
            turns.refuse(me, self._where)
            turns.pass_on(me)
        if self._results is None and self._error is None and self._ready():
            with contextlib.suppress(RuntimeError):  # `wait` raises it
                self.wait()
        return self._results is not None or self._error is not None

    def is_success(self) -> bool:
        """Whether it has been completed without an error."""
        return self._error is None and self.is_completed()

    def exception(self) -> Any:
        """What it has failed with, if it has."""
        return self._error

    def source_rank(self) -> int:
        """Whose message was received."""
        return self._source()

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        self.wait()
        return list(self._results or ())

    def get_future(self) -> Any:
        """A future that has its value: C++ waits for futures where no other rank could run."""
        future: Any = torch.futures.Future()
        try:
            future.set_result(self.result())
        except RuntimeError as error:
            future.set_exception(error)
        return future
