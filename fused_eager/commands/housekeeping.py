"""`cache`: look into the compile cache, ask why something missed, check it, move it and clean it.

Works on the tiers that the options name (`config` prints them), or on one store given with --store.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fused_eager.cache import (
    Cache,
    Entry,
    Key,
    LocalStore,
    Manifest,
    MissingExtra,
    StoreError,
    Tier,
    explain,
    generate,
    open_store,
)
from fused_eager.cache.bundle import Checked, entries, export_bundle, find, import_bundle, verify
from fused_eager.cache.key import json_text

from ..compiling.caching import Keeper, keeper
from ..config import OptionError, resolve
from ..running.choices import is_choice


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


def _size(manifest: Manifest) -> int:
    return sum(blob.size for blob in manifest.blobs)


def _ops(key: Key) -> list[str]:
    nodes = key.parts.get("region", {}).get("nodes", ())
    return [node["op"].removeprefix("aten.") for node in nodes]


def _age(manifest: Manifest) -> str:
    seconds = max(0.0, time.time() - manifest.created / 1000)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _row(tier: Tier, manifest: Manifest) -> dict[str, Any]:
    ops = _ops(manifest.key)
    return {
        "tier": tier.label,
        "kind": "choice" if is_choice(manifest.key.parts) else "region",
        "key": manifest.key.digest,
        "bytes": _size(manifest),
        "ops": len(ops),
        "first_op": ops[0] if ops else "",
        "created": manifest.created / 1000,
        "seconds": manifest.metadata.get("seconds", 0.0),
        "device": manifest.origin.device_kind,
        "host": manifest.origin.host_class,
        "versions": dict(manifest.versions),
        "signed": manifest.signature is not None,
        "choice": {name: manifest.metadata.get(name) for name in _CHOICE} if is_choice(manifest.key.parts) else None,
    }


_CHOICE = ("native", "fused_s", "native_s")


def _words(row: dict[str, Any]) -> str:
    """What an entry holds, for a person. What a choice says here is its writer's word, and may be anything."""
    if row["choice"] is None:
        return f"{row['ops']:>5} ops from {row['first_op']:<24} {row['seconds']:>7.2f} s to compile"
    native, *times = (row["choice"][name] for name in _CHOICE)
    seconds = [f"{1000 * t:.2f} ms" if isinstance(t, float) else "?" for t in times]
    return f"choice: {'native' if native is True else 'fused'}, {seconds[0]} fused, {seconds[1]} natively".ljust(61)


def ls(arguments: argparse.Namespace) -> int:
    """list entries, newest first"""
    place = Place(arguments)
    rows = [(_row(tier, c.manifest), _age(c.manifest)) for tier, c in place.each() if c.manifest is not None]
    if arguments.json:
        print(json.dumps([row for row, _ in rows], indent=2))
        return 0
    for row, age in rows:
        print(
            f"{row['key'][:16]}  {row['bytes']:>9,} B  {age:>7}  {_words(row)}  {row['tier']}"
        )
    print(f"{len(rows)} entries")
    return 0


def stats(arguments: argparse.Namespace) -> int:
    """count entries and bytes by tier, device and version"""
    place = Place(arguments)
    count: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()
    seconds: Counter[tuple[str, str, str]] = Counter()
    choices: Counter[tuple[str, str, str]] = Counter()
    damaged: Counter[str] = Counter()
    for tier, checked in place.each():
        if checked.manifest is None:
            damaged[f"{tier.label}: {checked.code}"] += 1
            continue
        m = checked.manifest
        versions = " ".join(f"{name} {version}" for name, version in sorted(m.versions.items()))
        group = (tier.label, f"{m.origin.device_kind} on {m.origin.host_class}", versions)
        count[group] += 1
        choices[group] += is_choice(m.key.parts)
        size[group] += _size(m)
        seconds[group] += m.metadata.get("seconds", 0.0)
    rows = [
        {
            "tier": g[0],
            "machine": g[1],
            "versions": g[2],
            "entries": n,
            "choices": choices[g],
            "bytes": size[g],
            "seconds": seconds[g],
        }
        for g, n in count.items()
    ]
    if arguments.json:
        print(json.dumps({"groups": rows, "damaged": damaged}, indent=2))
        return 0
    for row in rows:
        print(
            f"{row['tier']}: {row['entries']} entries, {row['choices']} of them choices, {row['bytes']:,} bytes, "
            f"{row['seconds']:.1f} s of compiling; {row['machine']}; {row['versions']}"
        )
    for what, n in damaged.items():
        print(f"{n} damaged: {what}")
    if not rows:
        print("no entries")
    return 0


def explain_keys(arguments: argparse.Namespace) -> int:
    """print the parts of a key, or the difference between two in words"""
    place = Place(arguments)
    first = place.one(arguments.key)
    if arguments.other is None:
        print(json.dumps(json.loads(json_text(first.key.to_json())), indent=2))
        return 0
    words = explain(first.key, place.one(arguments.other).key)
    print("\n".join(words) if words else "the keys are equal")
    return 0


def verify_entries(arguments: argparse.Namespace) -> int:
    """read every entry as a lookup would; with --recompile, prove each by compiling it again"""
    place = Place(arguments)
    place.keeper.describe_here()
    bad = good = skipped = choices = 0
    for tier in place.tiers:
        # Entries of other machines are none of ours to run, and sound all the same.
        policy = replace(place.keeper.cache.policy(tier), origin=None)
        try:
            for checked in verify(tier.store, policy):
                choice = checked.manifest is not None and is_choice(checked.manifest.key.parts)
                if choice and arguments.recompile and not checked.code:
                    choices += 1
                    continue
                code = checked.code or _proof(place, tier, checked, arguments.recompile)
                detail = f": {checked.detail}" if checked.detail else ""
                if code.startswith("made by another"):
                    skipped += 1
                elif code:
                    bad += 1
                    print(f"{checked.digest[:16]}  {tier.label}  {code}{detail}")
                else:
                    good += 1
        except StoreError as error:
            print(f"{tier.label}: {error}", file=sys.stderr)
            bad += 1
    what = "proved" if arguments.recompile else "sound"
    others = f", {skipped} for other machines or versions" if skipped else ""
    others += f", {choices} choices, which are measured and not compiled" if choices else ""
    print(f"{good} {what}, {bad} not{others}")
    return 1 if bad else 0


def _proof(place: Place, tier: Tier, checked: Checked, recompile: bool) -> str:
    if not recompile or checked.manifest is None:
        return ""
    from ..compiling.remake import prove

    alone = Cache([tier], keyring=place.keeper.cache.keyring)
    entry = alone.peek(checked.manifest.key)
    return prove(entry.key, entry.blobs) if isinstance(entry, Entry) else entry.reason


def gc(arguments: argparse.Namespace) -> int:
    """delete old, damaged and unused entries: of this host's folder, or of the store that --store names"""
    place = Place(arguments)
    if not arguments.store:
        place.tiers = tuple(tier for tier in place.tiers if not tier.shared)
    cutoff = (time.time() - arguments.older_than * 86400) * 1000 if arguments.older_than is not None else None
    deleted = 0
    for tier, checked in list(place.each()):
        m = checked.manifest
        if m is None or (cutoff is not None and m.created < cutoff):
            tier.store.delete(f"ac/{checked.digest}")
            deleted += 1
    freed = 0
    for tier in place.tiers:
        store = tier.store
        if isinstance(store, LocalStore):
            before = store.usage()
            used = {f"cas/{blob.sha256}" for c in entries(store) if c.manifest for blob in c.manifest.blobs}
            for stat in list(store.list("cas")):
                # A blob is written before its manifest: what is young may be about to get one.
                if stat.name not in used and stat.used < time.time() - 3600:
                    store.delete(stat.name)
            freed += before - store.gc(arguments.max_bytes)
    print(f"{deleted} entries deleted, {freed:,} bytes of blobs freed")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """write sound entries into one file, to be carried to another host"""
    place = Place(arguments)
    only = {place.one(prefix).key.digest for prefix in arguments.keys} or None
    tier = place.tiers[0]
    policy = replace(place.keeper.cache.policy(tier), origin=None)
    print(f"{export_bundle(tier.store, policy, arguments.file, only)} entries written to {arguments.file}")
    return 0


def import_entries(arguments: argparse.Namespace) -> int:
    """take the entries of such a file into every tier"""
    place = Place(arguments)
    found = import_bundle(place.keeper.cache, arguments.file, allow_unsigned=_unsigned(arguments))
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
            import_bundle(taken, arguments.file, allow_unsigned=_unsigned(arguments))
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


def keygen(arguments: argparse.Namespace) -> int:
    """make keys for shared stores: a line for writers and one for readers"""
    made = generate(arguments.kind)
    for name, line in made.items():
        print(f"# {name}\n{line}")
    return 0


def _unsigned(arguments: argparse.Namespace) -> bool:
    return bool(arguments.unsigned or resolve().cache_unsigned)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Look into the compile cache, check it, move it, clean it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, store: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run, store="")
        if store:
            added.add_argument("--store", default="", metavar="URL", help="this store instead of all tiers")
        return added

    for name, run in (("ls", ls), ("stats", stats)):
        command(name, run).add_argument("--json", action="store_true", help="print JSON")
    added = command("explain", explain_keys)
    added.add_argument("key", help="a key, or its first digits")
    added.add_argument("other", nargs="?", help="another one: print the difference")
    command("verify", verify_entries).add_argument(
        "--recompile", action="store_true", help="compile each region again and compare results, bit for bit"
    )
    added = command("gc", gc)
    added.add_argument("--older-than", type=float, metavar="DAYS", help="delete entries made before that")
    added.add_argument("--max-bytes", type=int, metavar="N", help="keep at most N bytes, the last used ones")
    added = command("export", export)
    added.add_argument("file")
    added.add_argument("keys", nargs="*", metavar="KEY", help="only these entries; default: all of the first tier")
    for name, run, needed in (("import", import_entries, None), ("warm", warm, "?")):
        added = command(name, run, store=name == "warm")
        added.add_argument("file", nargs=needed, help="a file that export wrote")  # type: ignore[arg-type]
        added.add_argument("--unsigned", action="store_true", help="believe it without signatures")
    command("keygen", keygen, store=False).add_argument(
        "kind", nargs="?", default="ed25519", choices=("ed25519", "hmac-sha256")
    )
    return parser


def main(argv: list[str], prog: str) -> int:
    """`cache`: run one of its commands. Returns 0, 1 if something is wrong with the cache, 2 for a wrong call."""
    arguments = _parser(prog).parse_args(argv)
    try:
        return arguments.run(arguments)
    except (Wrong, OptionError, MissingExtra, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except (OSError, tarfile.TarError, StoreError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


__all__ = ["main"]
