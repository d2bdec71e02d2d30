"""The work of a collective whose results are not yet where they belong when the group is done with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C import _distributed_c10d as c10d

from ...errors import FusedEagerError
from ...ranks import job

Tensor = torch.Tensor


class FollowedWork(c10d.Work):
    """The work of the host's group, after which something is done with its results: by whoever waits for it, or who
    asked for its future (DDP does), once.

    Arguments:
        work: the group's.
        finish: puts the results where they belong, and returns the tensors that were written. It is told for how many
            seconds the program has stood still for it; None where it waits in C++.
        told: what the collective is and where it was called, for errors.

    C++ holds its own half alone, which without this one would wait forever: it is kept until it is finished.
    """

    _kept: ClassVar[set[FollowedWork]] = set()

    def __init__(self, work: Any, finish: Callable[[float | None], list[Tensor]], told: str):
        super().__init__()
        self._work, self._finish, self._told = work, finish, told
        self._once = threading.Lock()
        self._results: list[Tensor] | None = None
        self._future: Any = None
        self._kept.add(self)

    def _finished(self, waited: float | None = None) -> list[Tensor]:
        with self._once:
            if self._results is None:
                try:
                    with torch.no_grad():
                        self._results = self._finish(waited)
                finally:
                    self._kept.discard(self)
        return self._results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the results are where they belong.

        Raises:
            RuntimeError: what the host's group raises, where a rank has gone or time is over.
        """
        if self._results is None:
            began = time.monotonic()
            try:
                self._work.wait(timeout) if timeout else self._work.wait()
            except BaseException as error:
                raise self._failed(error) from error
            self._finished(time.monotonic() - began)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would not have to wait for other ranks."""
        return self._results is not None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it has been completed without an error."""
        return self._results is not None or bool(self._work.is_success())

    def exception(self) -> Any:
        """What the host's group failed with, if it has."""
        return self._work.exception()

    def source_rank(self) -> int:
        """Whose message was received."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        self.wait()
        return self._finished()

    def get_future(self) -> Any:
        """A future of `result`. What the host's group has none for (sending, receiving) is waited for."""
        if self._future is None:
            try:
                self._future = self._work.get_future().then(self._followed)
            except RuntimeError:
                self._future = torch.futures.Future()
                self._future.set_result(self.result())
        return self._future

    def _followed(self, done: Any) -> list[Tensor]:
        try:
            done.value()  # raises what the group raised
        except BaseException as error:
            raise self._failed(error) from error
        return self._finished()

    def _failed(self, error: BaseException) -> BaseException:
        """The group's error, with the collective and the program's line before its words; or, where another rank is
        lost, what is known of that."""
        self._kept.discard(self)
        if not isinstance(error, RuntimeError) or isinstance(error, FusedEagerError):
            return error
        explained = job.explain(error, f"waits in {self._told}")
        return type(error)(f"{self._told}: {error}") if explained is error else explained
