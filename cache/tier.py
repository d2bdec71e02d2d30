"""One tier of a cache: a store, how far it is trusted, and how long it is waited for."""

from __future__ import annotations

from dataclasses import dataclass, field

from .guard import Breaker, Guard
from .store import Store


@dataclass
class Tier:
    """A store and how far it is trusted and waited for.

    `shared`: others write to it; it is written in the background, and every operation has a deadline: `timeout_s` for
    a whole read, `write_timeout_s` for a write. `signed` (default: as `shared`): only entries that the keyring
    vouches for are read, and only a keyring that can sign writes.
    """

    store: Store
    shared: bool = False
    signed: bool | None = None
    writable: bool = True
    timeout_s: float = 5.0
    write_timeout_s: float = 30.0
    breaker: Breaker | None = None
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = Guard(self.store.label, threads=self.shared, breaker=self.breaker)

    @property
    def label(self) -> str:
        return self.store.label

    @property
    def needs_signature(self) -> bool:
        return self.shared if self.signed is None else self.signed
