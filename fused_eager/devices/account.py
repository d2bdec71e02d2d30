"""The account of a device's memory, where somebody wants to know the most that was taken at once.

A platform may keep one that cannot be begun anew, and the CPU that stands in keeps none. So this one begins where it is
first asked for, and looks as each region begins: who never asks pays nothing.
"""

from __future__ import annotations

from .buffer import Table, living
from .home import nbytes_of


class Account:
    """The most bytes that a device's values and one region have taken at once, since it was begun."""

    def __init__(self) -> None:
        self.is_kept = False
        self.peak = 0
        self.exhausted = 0  # how often there was no memory left, from the first on

    def begin(self, table: Table) -> None:
        """Forget what was, and count from here on."""
        self.is_kept, self.peak = True, _held(table)

    def count(self, table: Table, needs: int) -> None:
        """A region begins that takes `needs` bytes beside its arguments, for results and temporaries. What other
        regions of its flush have made, and no tensor holds yet, is not seen."""
        self.peak = max(self.peak, _held(table) + needs)


def _held(table: Table) -> int:
    return sum(map(nbytes_of, living(table)))
