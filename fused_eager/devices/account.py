"""The account of a device's memory, where somebody wants to know the most that was taken at once.

A platform may keep one that cannot be begun anew, and the CPU that stands in keeps none. So this one begins where it is
first asked for, and looks as each region begins: who never asks pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .buffer import Table, sweep


class Account:
    """The most bytes that a device's values and one region have taken at once, since it was begun."""

    def __init__(self) -> None:
        self.is_kept = False
        self.peak = 0
        self.exhausted = 0  # how often there was no memory left, from the first on

    def begin(self, table: Table) -> None:
        """Forget what was, and count from here on."""
        sweep(table)
        self.is_kept, self.peak = True, _held(table)

    def count(self, table: Table, values: Iterable[Any], needs: int) -> None:
        """A region begins that takes `needs` bytes beside its arguments, for results and temporaries. `values` are
        those of its flush: what it reads may be pending for its tensor already, and what other regions have made may
        have none yet."""
        self.peak = max(self.peak, _held(table, values) + needs)


def _held(table: Table, values: Iterable[Any] = ()) -> int:
    """The bytes of all arrays that tensors or a flush hold, each once."""
    arrays = [b.array for b in table.values() if b.array is not None]
    arrays += [v for v in values if not isinstance(v, torch.Tensor)]  # those are the host's
    return sum(a.nbytes for a in {id(a): a for a in arrays}.values())
