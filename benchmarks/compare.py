"""Two runs of the table beside each other: `python -m benchmarks.compare OLD.json NEW.json` says which rows moved.

What is compared are ratios to plain eager, each from one process and run. A row has moved if its two medians lie
farther apart than both runs' spreads together, and by more than `LEAST`; anything less is noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST = 0.05  # of the old ratio
# Where these differ, a row may have moved for their sake.
SETTINGS = ("machine", "torch", "jax", "threads", "malloc", "rounds", "block_s")


@dataclass(frozen=True)
class Moved:
    """One workload in one system: time over plain eager's, and the interquartile range, in each run."""

    workload: str
    system: str
    old: float
    old_spread: float
    new: float
    new_spread: float

    @property
    def by(self) -> float:
        """The part of the old ratio that the new one is more, or less than 0 where it is faster."""
        return self.new / self.old - 1

    @property
    def is_beyond_noise(self) -> bool:
        return abs(self.new - self.old) > self.old_spread + self.new_spread and abs(self.by) > LEAST


def read(path: Path) -> dict[str, Any]:
    """What `python -m benchmarks --json FILE` has written.

    Raises:
        ValueError: the file is not there, or is something else.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not {"settings", "rows"} <= set(found):
        raise ValueError(f"{path} is not what `python -m benchmarks --json FILE` writes: it has no settings or no rows")
    return found


def _timings(run: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    for row in run["rows"]:
        for system, timing in row["timings"].items():
            if system != "eager":
                yield (row["workload"], system), timing


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Moved], list[str]]:
    """What both runs have measured, and a line for each row that only one of them has a figure of."""
    before, after = dict(_timings(old)), dict(_timings(new))
    rows, missing = [], []
    for key in [*before, *(key for key in after if key not in before)]:
        was, now = before.get(key), after.get(key)
        figures = [t["ratio"] if t is not None and not t["failure"] else None for t in (was, now)]
        if None in figures:
            why = [("not measured" if t is None else t["failure"] or "has a figure") for t in (was, now)]
            missing.append(f"{key[0]}, {key[1]}: {why[0]} before, {why[1]} after")
        elif was is not None and now is not None:
            rows.append(Moved(*key, was["ratio"], was["ratio_spread"], now["ratio"], now["ratio_spread"]))
    return rows, missing


def render(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The table, rows that moved first and the slowest of those first."""
    rows, missing = compare(old, new)
    moved = sorted((row for row in rows if row.is_beyond_noise), key=lambda row: -row.by)
    lines = [
        f"{name}: {old['settings'].get(name)} before, {new['settings'].get(name)} after"
        for name in SETTINGS
        if old["settings"].get(name) != new["settings"].get(name)
    ]
    lines += ["| workload | system | before | after | |", "|---|---|---|---|---|"]
    for row in [*moved, *(row for row in rows if not row.is_beyond_noise)]:
        said = f"{'slower' if row.by > 0 else 'faster'} by {abs(row.by):.0%}" if row.is_beyond_noise else "noise"
        before, after = f"{row.old:.2f} ({row.old_spread:.2f})", f"{row.new:.2f} ({row.new_spread:.2f})"
        lines.append(f"| {row.workload} | {row.system} | {before} | {after} | {said} |")
    return "\n".join([*lines, *missing, f"{len(moved)} of {len(rows)} rows moved beyond noise"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="Say which rows have moved.")
    parser.add_argument("old", type=Path, help="what `python -m benchmarks --json FILE` has written")
    parser.add_argument("new", type=Path)
    args = parser.parse_args(argv)
    try:
        print(render(read(args.old), read(args.new)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
