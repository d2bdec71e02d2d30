"""The work of a collective of a device's tensors: whoever uses a result waits for it, and not the program.

It is as on a device whose queue the collective is a part of: `wait`, which torch calls where `async_op` is not asked
for, only says that what comes later comes after it. A collective is started at its line all the same, in the program's
order, and what it reads is waited for before: so each waits for those alone that were started earlier, on every rank,
and no two wait for one another.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, ClassVar

import torch

from ...devices.arrivals import EXPECTED
from ...devices.buffer import LOCK
from ...ranks.work import Finish, FollowedWork

# Gloo's works of these never say that they are completed. Who asks waits.
SILENT = frozenset({"reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"})
AT_ONCE = 2  # so many are on their way: nobody sees that one has come, and each holds memory of the host's


class ArrivingWork(FollowedWork):
    """A work whose results are waited for where they are used.

    Arguments:
        storages: those that it writes; where there are none, `wait` is what waits.
        is_silent: it is one of `SILENT`.
    """

    _silent: ClassVar[list[ArrivingWork]] = []

    def __init__(
        self, work: Any, finish: Finish, told: str, storages: list[torch.UntypedStorage], is_silent: bool = False
    ):
        # Results are put back under the runtime's lock, which whoever waits for one of them may hold.
        super().__init__(work, finish, told, once=LOCK)
        self._storages = storages
        self._is_expected = False
        self._is_silent = is_silent

    @classmethod
    def make_room(cls) -> None:
        """One of `SILENT` is about to start: wait for the oldest if there are too many. What one has failed with is
        raised where its result is used."""
        while len(cls._silent) >= AT_ONCE:
            with contextlib.suppress(RuntimeError):
                cls._silent.pop(0).block(is_raised=False)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Have whoever uses a result wait for it. With a timeout, and if there is nothing to wait for any more, wait
        here. Raises as `block`."""
        if timeout or not self._storages or self.has_come():
            return self.block(timeout)
        self._is_expected = True
        if self._is_silent and self not in self._silent:
            self._silent.append(self)
        for storage in self._storages:
            EXPECTED[storage._cdata] = self
        return True

    def is_completed(self) -> bool:
        """As on any work. After `wait` it is: whoever asks has waited."""
        return self.block() if self._is_expected else super().is_completed()

    def _has_come(self) -> bool:
        return self._is_silent or self.has_come()

    def get_future(self) -> Any:
        """As on any work. Who has waited may look at its value at once, as the reducer does from C++."""
        if self._is_expected:
            self.block()
        return super().get_future()

    def arrive(self, is_raised: bool = True) -> None:
        """As `block`."""
        self.block(is_raised=is_raised)

    def has_come(self) -> bool:
        """Whether all ranks have done their part, or it has failed."""
        return super()._has_come()

    def _finished(self, waited: float | None = None) -> Any:
        with LOCK:
            mine = [storage._cdata for storage in self._storages if EXPECTED.get(storage._cdata) is self]
            for cdata in mine:  # else putting them back would wait for them
                del EXPECTED[cdata]
            try:
                results = super()._finished(waited)
                if self in self._silent:
                    self._silent.remove(self)
                return results
            except BaseException:
                EXPECTED.update(dict.fromkeys(mine, self))
                raise
