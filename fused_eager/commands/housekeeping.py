"""`cache`: look into the compile cache, ask why something missed, check it, move it and clean it.

Works on the tiers that the options name (`config` prints them), or on one store given with --store.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from fused_eager.cache import Cache, Entry, Key, LocalStore, Manifest, MissingExtra, StoreError, Tier, explain, generate
from fused_eager.cache.bundle import Checked, entries, verify
from fused_eager.cache.key import json_text

from ..config import OptionError
from ..executing.choices import is_choice
from .carrying import export, import_entries, warm
from .place import Place, Wrong


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
    for option, given in (("--max-bytes", arguments.max_bytes), ("--older-than", arguments.older_than)):
        # Either would delete everything: less than nothing is kept, or what was made before a day to come.
        if given is not None and not given >= 0:  # nor is NaN
            raise Wrong(f"{option} is {given} and must be 0 or more; nothing was deleted")
    place = Place(arguments)
    if not arguments.store:
        place.tiers = tuple(tier for tier in place.tiers if not tier.shared)
    others = [tier.label for tier in place.tiers if not isinstance(tier.store, LocalStore)]
    if others and arguments.max_bytes is not None:
        raise Wrong(f"--max-bytes bounds a folder, and {others[0]} is none; nothing was deleted")
    before = {tier.label: tier.store.usage() for tier in place.tiers if isinstance(tier.store, LocalStore)}
    cutoff = (time.time() - arguments.older_than * 86400) * 1000 if arguments.older_than is not None else None
    deleted = 0
    for tier, checked in list(place.each()):
        m = checked.manifest
        if m is None or (cutoff is not None and m.created < cutoff):
            tier.store.delete(f"ac/{checked.digest}")
            deleted += 1
    freed = evicted = 0
    for tier in place.tiers:
        store = tier.store
        if isinstance(store, LocalStore):
            used = {f"cas/{blob.sha256}" for c in entries(store) if c.manifest for blob in c.manifest.blobs}
            for stat in list(store.list("cas")):
                # A blob is written before its manifest: what is young may be about to get one.
                if stat.name not in used and stat.used < time.time() - 3600:
                    store.delete(stat.name)
            held = {stat.name for stat in store.list("ac")}
            freed += before[tier.label] - store.gc(arguments.max_bytes)
            evicted += len(held - {stat.name for stat in store.list("ac")})
    print(f"{deleted} entries deleted, {evicted} evicted as the least recently used, {freed:,} bytes freed")
    return 0


def keygen(arguments: argparse.Namespace) -> int:
    """make keys for shared stores: a line for writers and one for readers"""
    made = generate(arguments.kind)
    for name, line in made.items():
        print(f"# {name}\n{line}")
    return 0


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
    added.add_argument("--max-bytes", type=int, metavar="N", help="keep at most N bytes, the last used ones; 0: none")
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
