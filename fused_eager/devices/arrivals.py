"""Arrivals: storages whose values are on their way from other ranks, and waiting for one where it is used.

A collective is waited for as on a device whose queue it is a part of: the program goes on, and whoever uses a result
waits. Doors ask here before they take the runtime's lock, so that no other thread waits as well; what comes past them
is caught where a device is asked for the value of a storage.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch

from fused_eager.fusion_rules.lowering import leaves

from .storage import storage_of


class Arrival(Protocol):
    """What brings a value."""

    def arrive(self, is_raised: bool = True) -> None:
        """Wait for it, and put it where it belongs. `is_raised`: the program is told of what kept it from coming."""

    def has_come(self) -> bool:
        """Whether it is there to be put: nobody would wait."""


EXPECTED: dict[int, Arrival] = {}  # by the address of a storage


def await_values(values: Any) -> None:
    """Have the storages of these tensors hold their values.

    Raises:
        RankLost, RuntimeError: what kept one from coming, each time that it is asked for.
    """
    if EXPECTED:
        for t in leaves([values]):
            if isinstance(t, torch.Tensor) and not t.is_cpu and torch._C._has_storage(t):
                await_storage(storage_of(t))


def await_storage(storage: torch.UntypedStorage) -> None:
    """The same of one storage."""
    arrival = EXPECTED.get(storage._cdata)
    if arrival is not None:
        arrival.arrive()


def await_all(come: bool = False) -> None:
    """Have all values put where they belong. Raises as `await_values`.

    With `come`, only those are put that have come by now. What kept one from coming is raised where it is used.
    """
    for arrival in dict.fromkeys(list(EXPECTED.values())):
        if not come:
            arrival.arrive()
        elif arrival.has_come():
            with contextlib.suppress(RuntimeError):
                arrival.arrive(is_raised=False)
