"""Carrying: the commands of `cache` that write entries into a file, and take or compile what is in one."""

from __future__ import annotations

import argparse
import tarfile
import tempfile
from collections import Counter
from dataclasses import replace

from fused_eager.cache import Cache, LocalStore, Tier
from fused_eager.cache.bundle import Checked, export_bundle, import_bundle
from fused_eager.cache.key import json_text

from ..config import resolve
from ..executing.choices import is_choice
from .place import Place, Wrong


def export(arguments: argparse.Namespace) -> int:
    """write sound entries into one file, to be carried to another host"""
    place = Place(arguments)
    only = {place.one(prefix).key.digest for prefix in arguments.keys} or None
    if not place.tiers:
        raise Wrong("the cache has no store to export from (cache_bytes is 0); name one: --store URL")
    tier = place.tiers[0]
    policy = replace(place.keeper.cache.policy(tier), origin=None)
    print(f"{export_bundle(tier.store, policy, arguments.file, only)} entries written to {arguments.file}")
    return 0


def import_entries(arguments: argparse.Namespace) -> int:
    """take the entries of such a file into every tier"""
    place = Place(arguments)
    found = _take(place.keeper.cache, arguments)
    done = place.keeper.cache.flush(60.0)
    refused = [c for c in found if c.code]
    for checked in refused:
        print(f"{checked.digest[:16]}  refused: {checked.code} {checked.detail}".rstrip())
    print(f"{len(found) - len(refused)} entries imported, {len(refused)} refused")
    if any(checked.code == "unsigned" for checked in refused):
        print("Nobody has signed them: --unsigned takes them all the same, if you trust whoever has written the file.")
    return 0 if done and not refused else 1


def warm(arguments: argparse.Namespace) -> int:
    """compile for this machine what the entries of others show will be needed"""
    from ..compiling.remake import warm as warm_one

    place = Place(arguments)
    with tempfile.TemporaryDirectory(prefix="fused-eager-warm-") as folder:
        if arguments.file:
            store = LocalStore(folder, max_bytes=1 << 62, label="bundle")
            taken = Cache([Tier(store)], keyring=place.keeper.cache.keyring)
            _take(taken, arguments)
            place.tiers = taken.tiers
        done: Counter[str] = Counter()
        seen: set[str] = set()
        for tier, checked in place.each():
            m = checked.manifest
            if m is None or (tier.needs_signature and place.keeper.cache.keyring.refusal(m)):
                done["refused"] += 1
                continue
            if is_choice(m.key.parts):
                done["skipped: choices, which a machine of the new kind measures"] += 1
                continue
            region = json_text(m.key.to_json().get("region"))
            if region not in seen:
                seen.add(region)
                outcome = warm_one(place.keeper, m.key)
                done[outcome] += 1
        flushed = place.keeper.flush(300.0)
    for outcome, n in done.items():
        print(f"{n} {outcome}")
    return 0 if flushed and not any(o.startswith("failed") for o in done) else 1


def _take(cache: Cache, arguments: argparse.Namespace) -> list[Checked]:
    """What became of each entry of the bundle, in `cache`. Raises OSError, and TarError naming the file."""
    unsigned = bool(arguments.unsigned or resolve().cache_unsigned)
    try:
        return import_bundle(cache, arguments.file, allow_unsigned=unsigned)
    except tarfile.TarError as error:  # in the words of a format that nobody was told of
        raise tarfile.ReadError(
            f"{arguments.file} is no bundle of cache entries, or is damaged ({error}); `cache export FILE` makes one"
        ) from error
