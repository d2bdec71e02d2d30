"""Comparing two runs: what got slower or faster, and which compilations, waits and islands came or went."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import FusedEagerError
from .facts import Facts
from .report import Report
from .source import short, shorten
from .text import duration, show, times

ROWS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One thing in two runs: `a` and `b` are its numbers, in what `show` makes of them."""

    what: str
    a: float
    b: float
    show: Callable[[float], str]

    def __str__(self) -> str:
        ratio = f"{self.b / self.a:.2f}x" if self.a else "new" if self.b else ""
        return f"{self.what:<52.52} {self.show(self.a):>12} {self.show(self.b):>12} {ratio:>8}"


def _count(value: float) -> str:
    return f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:.3g}"


def per_round(f: Facts, value: float) -> float:
    """A sum, per round of the loop where there are any: two runs need not be of one length."""
    return value / f.steps if f.steps else value


def _per_second(f: Facts) -> float:
    return f.steps / f.seconds if f.seconds else 0.0


def totals(a: Facts, b: Facts) -> list[Row]:
    """The sums that two runs are judged by."""
    each = " per round" if a.steps and b.steps else ""
    rows = [
        Row("rounds per second", _per_second(a), _per_second(b), _rate),
        Row("rounds", a.steps, b.steps, _count),
        Row("seconds in all", a.seconds, b.seconds, duration),
        Row("compilations", len(a.compiles), len(b.compiles), _count),
        Row("of them in another form of known ops", len(a.again), len(b.again), _count),
        Row("compiling", a.compiling_in_all, b.compiling_in_all, duration),
    ]
    for (name, x), (_, y) in zip(times(a)[1:4], times(b)[1:4], strict=True):
        rows.append(Row(name + each, per_round(a, x), per_round(b, y), duration))
    rows += [
        Row("ops" + each, per_round(a, a.ops), per_round(b, b.ops), _rate),
        Row("flushes" + each, per_round(a, a.flushes), per_round(b, b.flushes), _rate),
        Row("region runs" + each, per_round(a, a.runs), per_round(b, b.runs), _rate),
        Row("waits" + each, sum(_waits(a).values()), sum(_waits(b).values()), _rate),
        Row("recording, per op", a.recording_per_op or 0.0, b.recording_per_op or 0.0, duration),
        Row("peak memory (MB)", a.peak / 2**20, b.peak / 2**20, _count),
    ]
    return [r for r in rows if r.a or r.b]


def _changes(title: str, a: Mapping[str, float], b: Mapping[str, float], show: Callable[[float], str]) -> list[str]:
    """What is in one of two tables only, or differs by more than a tenth; the largest differences first."""
    keys = sorted(a.keys() | b.keys(), key=lambda k: -abs(b.get(k, 0.0) - a.get(k, 0.0)))
    rows = []
    for key in keys:
        x, y = a.get(key, 0.0), b.get(key, 0.0)
        if abs(x - y) > 0.1 * max(x, y):
            sign = "+" if not x else "-" if not y else " "
            rows.append(f"  {sign} {show(x):>9} -> {show(y):<9} {key}")
    more = [f"    and {len(rows) - ROWS} more"] if len(rows) > ROWS else []
    return ["", title, *rows[:ROWS], *more] if rows else []


def difference(a: Report, b: Report) -> str:
    """The whole comparison as text; lines of programs are compared by their text where their numbers have moved."""
    f, g = a.facts, b.facts
    lines = [f"{'':<52} {'A':>12} {'B':>12} {'B / A':>8}"]
    lines += [str(row) for row in totals(f, g)]
    lines += _changes("Waits (times per round):", _waits(f), _waits(g), _rate)
    lines += _changes("Compilations (seconds):", _compiles(f), _compiles(g), duration)
    lines += _changes("Ops that run natively (told):", _islands(f), _islands(g), _count)
    lines += _changes("Regions (median of one run alone):", _regions(f), _regions(g), duration)
    old, new = ({(x.kind, x.site): x for x in r.advice} for r in (a, b))
    for title, rows in (("Advice that is new in B:", new.keys() - old.keys()), ("Gone:", old.keys() - new.keys())):
        if rows:
            found = [(new.get(k) or old[k]) for k in rows]
            lines += ["", title, *[f"    {short(x.site)}: {x.title}" for x in sorted(found, key=lambda x: -x.seconds)]]
    return "\n".join(lines)


def _waits(f: Facts) -> dict[str, float]:
    out: collections.Counter[str] = collections.Counter()
    for s in f.syncs:
        out[f"{short(s.site)} {s.reason} {s.detail}"] += s.count
    return {key: per_round(f, n) for key, n in out.items()}


def _compiles(f: Facts) -> dict[str, float]:
    out: dict[str, float] = collections.defaultdict(float)
    for c in f.compiles:
        out[shorten(f"{c.region}: {c.why}", [*f.lines, c.site])] += c.seconds
    return dict(out)


def _islands(f: Facts) -> dict[str, float]:
    out: collections.Counter[str] = collections.Counter()
    for i in f.islands:
        out[f"{short(i.site)} {i.op}: {i.reason}"] += i.count
    return dict(out)


def _regions(f: Facts) -> dict[str, float]:
    # A handful of samples: differences of microseconds are noise.
    return {shorten(r.name, f.lines): r.alone for r in f.regions if r.alone is not None and r.alone > 1e-4}


def main(argv: list[str], prog: str) -> int:
    """`diff A B`: what is different between two runs."""
    parser = argparse.ArgumentParser(prog=prog, description=main.__doc__)
    parser.add_argument("a", metavar="A", help="the event log of the earlier run")
    parser.add_argument("b", metavar="B", help="the event log of the later run")
    arguments = parser.parse_args(argv)
    try:
        a, b = Report.read(arguments.a), Report.read(arguments.b)
    except (FusedEagerError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    show(difference(a, b))
    return 0
