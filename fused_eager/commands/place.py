"""Which tiers the command `cache` works on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from fused_eager.cache import Cache, LocalStore, Manifest, StoreError, Tier, open_store
from fused_eager.cache.bundle import Checked, entries, find

from ..compiling.caching import Keeper, keeper
from ..config import resolve


class Wrong(Exception):
    """The command cannot do what was asked; the text says why."""


class Place:
    """The tiers that a command works on. The keeper's cache has the keys and the machine; `tiers` may be others."""

    def __init__(self, arguments: argparse.Namespace):
        config = resolve()
        found = keeper(config)
        if found is None:
            raise Wrong("the cache is off (option 'cache')")
        self.keeper: Keeper = found
        self.tiers: tuple[Tier, ...] = found.cache.tiers
        if arguments.store:
            self.tiers = (_tier(arguments.store, found.cache, config.cache_unsigned),)

    def each(self) -> Iterator[tuple[Tier, Checked]]:
        """Every entry of every tier that can list, newest first within its tier."""
        for tier in self.tiers:
            try:
                found = list(entries(tier.store))
            except StoreError as error:
                print(f"{tier.label}: {error}", file=sys.stderr)
                continue
            found.sort(key=lambda c: (-(c.manifest.created if c.manifest else 0), c.digest))
            for checked in found:
                yield tier, checked

    def one(self, prefix: str) -> Manifest:
        """The manifest whose key begins so. Raises Wrong if there is none, or if there are several."""
        found: dict[str, Manifest] = {}
        for tier in self.tiers:
            try:
                found.update((m.key.digest, m) for m in find(tier.store, prefix))
            except StoreError as error:
                print(f"{tier.label}: {error}", file=sys.stderr)
        if len(found) != 1:
            raise Wrong(f"{len(found)} entries have a key that begins with {prefix!r}")
        return next(iter(found.values()))


def _tier(url: str, cache: Cache, unsigned: bool) -> Tier:
    """A store named on the command line: the local tier if it is that one, else as shared as any other."""
    for tier in cache.tiers:
        if url == tier.label or (isinstance(tier.store, LocalStore) and url == str(tier.store.root)):
            return tier
    return Tier(open_store(url), shared=True, signed=not unsigned)
