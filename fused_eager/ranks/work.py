"""The work of a collective: what is done when the group is done with it, and what the event log is told of it."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from fused_eager.cache.exits import call_at_exit, fail_at_exit, note_codes
from fused_eager.fusion_rules.lowering import leaves

from ..errors import FusedEagerError
from ..log.events import LOG
from . import job, order, status
from .table import Collective

Tensor = torch.Tensor
Finish = Callable[[float | None], list[Tensor] | None]
# A context has others, for what the program hangs on a future, and waits for.
_THEN, _TELL, _WAIT = torch._C.Future.then, torch._C.Future.add_done_callback, c10d.Work.wait
_PUBLIC = frozenset(distributed.distributed_c10d.__all__)

_GIVEN: weakref.WeakKeyDictionary[Any, FollowedWork] = weakref.WeakKeyDictionary()  # to a reducer, for its next pass


def kept_for_reducers(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Reducer._set_forward_pass_work_handle`: C++ keeps its own half of the work alone, and asks it for its result
    when it has been finished."""

    @functools.wraps(original)
    def _set_forward_pass_work_handle(self: Any, work: Any, use_static_world_size: bool) -> None:
        _GIVEN[self] = work
        original(self, work, use_static_world_size)

    return _set_forward_pass_work_handle


def told(row: Collective, group: Any, nbytes: int, fetched: float, place: str) -> Callable[[float | None], None]:
    """What tells the event log of a collective that begins now, once it has ended.

    It does not hold the group: one of gloo's threads may be the last to let go of this, and a group that ends in a
    thread of its own ends the process.

    Arguments:
        nbytes: of all tensors that it takes.
        fetched: the seconds that went before it, for what it reads.
        place: the program's line.
    """
    name, size, started = group.group_name, group.size(), time.monotonic()
    number = order.numbered(group, row)

    def ended(waited: float | None) -> None:
        LOG.emit(
            "collective", op=row.op, group=name, sequence=number, bytes=nbytes, ranks=size,
            seconds=time.monotonic() - started, fetch_s=fetched, wait_s=waited, site=place,
        )  # fmt: skip

    return ended


def nbytes_of(values: list[Any]) -> int:
    """The bytes of the tensors among these values; memory that several have is counted once."""
    taken: dict[int, int] = {}
    for t in leaves(values):
        if isinstance(t, Tensor):
            parts = [t._indices(), t._values()] if t.layout is torch.sparse_coo else [t]
            taken.update((p.untyped_storage()._cdata, p.nbytes) for p in parts if torch._C._has_storage(p))
    return sum(taken.values())


def described(row: Collective, group: Any, place: str) -> str:
    """A collective for errors: "allreduce of rank 0 in a group of 2, at train.py:12"."""
    return f"{row.op.strip('_')} of rank {group.rank()} in a group of {group.size()}, at {place}"


class FollowedWork(c10d.Work):
    """The work of the host's group, after which something is done with its results: by whoever waits for it, or who
    asked for its future (DDP does), once.

    Arguments:
        work: the group's.
        finish: puts the results where they belong, and returns the tensors that were written; None if they are where
            the group has put them. It is told for how many seconds the program has stood still for it; None where it
            waits in C++.
        told: what the collective is and where it was called, for errors.
        once: whoever has it may put the results where they belong.
        is_pythons: C++ hands it to Python and does not keep it. Nobody need wait for what is sent.
        is_told_only: `finish` tells somebody of it, and the results are where the group has put them.

    C++ may hold its own half alone, which without this one would wait forever: it is kept until it is finished.
    """

    _kept: ClassVar[set[FollowedWork]] = set()
    _handed: ClassVar[Any] = threading.local()  # in each thread the last one that is on its way to Python

    def __init__(
        self,
        work: Any,
        finish: Finish,
        told: str,
        is_pythons: bool = False,
        once: Any = None,
        is_told_only: bool = False,
    ):
        super().__init__()
        self._work, self._finish, self._told = work, finish, told
        self._once = once or threading.Lock()
        at = status.place()
        # As the program names it, if it is the program that has called it.
        self.called = at.collective if at.collective in _PUBLIC else told.partition(" ")[0]
        self._where = f"waits in {self.called} at {at.line}"
        self._is_finished, self._is_told_only = False, is_told_only
        self._results: list[Tensor] | None = None  # None: those of the group's work
        self._future: Any = None
        if is_pythons:
            self._handed.last = self
        else:
            self._kept.add(self)
            _before_the_end()

    def _finished(self, waited: float | None = None) -> list[Tensor] | None:
        with self._once:
            if not self._is_finished:
                try:
                    with torch.no_grad():
                        self._results = self._finish(waited)
                    self._is_finished = True
                finally:
                    self._kept.discard(self)
                    if getattr(self._handed, "last", None) is self:
                        self._handed.last = None
        return self._results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As `block`."""
        return self.block(timeout)

    def block(self, timeout: timedelta = timedelta(0), is_raised: bool = True) -> bool:
        """Wait until the results are where they belong.

        Arguments:
            is_raised: whether the program is told of an error.

        Raises:
            RuntimeError: what the host's group raises, where a rank has gone or time is over.
        """
        if not self._is_finished:
            began = time.monotonic()
            try:
                _WAIT(self._work, timeout) if timeout else _WAIT(self._work)
            except BaseException as error:
                raise self._failed(error, is_raised) from error
            self._finished(time.monotonic() - began)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would not have to wait for other ranks. Then the results are where they belong, as a program
        may look at them without another word."""
        if not self._has_come():
            return False
        with contextlib.suppress(RuntimeError):  # `wait` raises it
            self.block(is_raised=False)
        return True

    def _has_come(self) -> bool:
        return self._is_finished or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it has been completed without an error."""
        self.is_completed()
        return self._is_finished or bool(self._work.is_success())

    def exception(self) -> Any:
        """What the host's group failed with, if it has."""
        return self._work.exception()

    def source_rank(self) -> int:
        """Whose message was received."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        self.block()
        found = self._finished()
        return list(self._work.result()) if found is None else found

    def get_future(self) -> Any:
        """A future of `result`. What the host's group has none for (sending, receiving) is waited for."""
        if self._future is None:
            try:
                future = self._work.get_future()
                if self._is_told_only:
                    # The group's own, for C++: of one that Python has made it cannot tell that it is of tensors.
                    _TELL(future, self._told_of)
                    self._future = future
                else:
                    self._future = _THEN(future, self._followed)
            except RuntimeError:
                self._future = torch.futures.Future()
                self._future.set_result(self.result())
        return self._future

    def _told_of(self, done: Any) -> None:
        try:
            done.value()
        except BaseException:  # whoever waits for it raises it
            self._kept.discard(self)
        else:
            self._finished()

    def _followed(self, done: Any) -> Any:
        try:
            value = done.value()  # raises what the group raised
        except BaseException as error:
            raise self._failed(error, is_raised=False) from error  # in the future, for whoever looks
        found = self._finished()
        return value if found is None else found

    @classmethod
    def finish_all(cls) -> None:
        """At the end of the process: wait for what nobody has waited for. It fails if one of them does.

        Once something has failed nobody waits any more: a rank that ends closes its connections, which is how the
        others get out of what they wait in.
        """
        for work in list(cls._kept):
            beat = job.current()
            if beat is not None and beat.fault is not None:
                return  # the job says so
            try:
                work.block()
            except RuntimeError as error:
                failed: BaseException = error
                break
        else:
            return
        fail_at_exit(failed)

    def _failed(self, error: BaseException, is_raised: bool = True) -> BaseException:
        """The group's error, with the collective and the program's line before its words; or, where another rank is
        lost, what is known of that."""
        self._kept.discard(self)
        if not isinstance(error, RuntimeError) or isinstance(error, FusedEagerError):
            return error
        explained = job.explain(error, self._where, is_raised)
        return type(error)(f"{self._told}: {error}") if explained is error else explained


@functools.cache
def _before_the_end() -> None:
    """A process that ends does its part before, as others wait for it, and learns whether it has been done."""
    call_at_exit(FollowedWork.finish_all)
    note_codes()
