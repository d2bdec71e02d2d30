"""A dict that never grows past a limit: what is remembered about programs must not outgrow their memory."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """At most `limit` entries; a new one displaces the oldest. Everything kept here can be computed again."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.limit and key not in self:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, value)

    def keep(self, key: K, value: V) -> V:
        """The entry of a key, which is `value` from now on if there was none."""
        if key not in self:
            self[key] = value
        return self[key]
