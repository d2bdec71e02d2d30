"""Explaining: run a function once, and say what became of each of its lines."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..compiling import measuring
from ..frontends.context.context import fused_eager
from ..log.events import LOG, Event
from ..log.reasons import CODES
from .reading import Process, from_memory
from .report import Report
from .rows import Region
from .source import short, shorten, split, text
from .text import count, duration
from .writer import want_details


@contextlib.contextmanager
def watching() -> Iterator[list[Event]]:
    """Everything that the body tells, with all details; every region is waited for and timed."""
    seen: list[Event] = []
    LOG.sinks.append(seen.append)
    want_details(1)
    was, measuring.every_run = measuring.every_run, True
    try:
        yield seen
    finally:
        measuring.every_run = was
        want_details(-1)
        LOG.sinks.remove(seen.append)


@dataclass(frozen=True)
class Explanation:
    """What one call did: its result, and the report of it. `str()` shows each region with its lines."""

    result: Any
    report: Report

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the plans that ran, in order."""
        return tuple(r for r in self.report.facts.regions if r.count)

    @property
    def compilations(self) -> tuple[str, ...]:
        """What was compiled, in words."""
        return tuple(c.region for c in self.report.facts.compiles)

    @property
    def islands(self) -> tuple[tuple[str, str, str], ...]:
        """(op, reason, line) of ops that ran natively."""
        return tuple((i.op, i.reason, i.site) for i in self.report.facts.islands)

    @property
    def syncs(self) -> dict[str, int]:
        """How often work was cut, by reason code."""
        return self.report.flushes

    def __str__(self) -> str:
        f = self.report.facts
        lines = [
            f"{count(f.ops, 'op')} in {count(f.runs, 'region')}; {len(f.compiles)} compiled in "
            f"{duration(f.compiling_in_all)}; {count(sum(s.count for s in f.syncs if s.reason != 'cut.exit'), 'wait')}"
        ]
        sites = list(f.lines)
        for number, region in enumerate(self.regions):
            alone = f", {duration(region.alone)} alone" if region.alone is not None else ""
            often = f", {region.count} times" if region.count > 1 else ""
            lines.append(f"region {number} [{region.how}], {region.ops} ops{often}{alone}; {_end(region)}")
            for line, rows in _by_line(region).items():
                shown = []
                for module, backward, ops in rows:
                    words = ", ".join(f"{op.removeprefix('aten.')} x{n}" if n > 1 else op.removeprefix("aten.")
                                      for op, n in ops.items())
                    shown.append(("backward of it: " if backward else "") + words + (f"  [{module}]" if module else ""))
                lines.append(f"    {short(line)}  {text(line)}")
                lines += [f"        {words}" for words in shown]
        for c in f.compiles:
            lines.append(f"compiled {shorten(c.region, sites)} in {duration(c.seconds)}: {shorten(c.why, sites)}")
        for s in [s for s in f.syncs if s.reason != "cut.exit"]:
            lines.append(f"waited {s.count} x for {s.reason} {s.detail} at {short(s.site)}: {duration(s.waited)}")
        lines += [f"island {op} at {short(place)}: {reason}" for op, reason, place in self.islands]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def _end(region: Region) -> str:
    where = f" at {short(region.site)}" if region.site and split(region.site)[1] else ""
    detail = f" ({region.detail})" if region.detail else ""
    return f"ended by {region.ended_by}: {CODES[region.ended_by].meaning}{detail}{where}"


def _by_line(region: Region) -> dict[str, list[tuple[str, bool, dict[str, int]]]]:
    out: dict[str, list[tuple[str, bool, dict[str, int]]]] = collections.defaultdict(list)
    for line, module, backward, ops in region.lines:
        out[line].append((module, backward, ops))
    return out


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call `function(*args, **kwargs)` once under `fused_eager(mode="fused")` and explain what happened to its ops; or,
    where `torch.compile` has made the function, as it is.

    Everything is finished on return; each region is waited for, so that its time can be told. Exceptions of the
    function pass through.
    """
    start = time.perf_counter()
    compiled = hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")
    with watching() as seen, contextlib.nullcontext() if compiled else fused_eager(mode="fused", compile="wait"):
        result = function(*args, **kwargs)
    return Explanation(result, Report.of([_with_plans(seen, start)]))


def _with_plans(seen: list[Event], start: float) -> Process:
    """The events, with the plans that they speak of and that were told before."""
    wanted = {e.data["plan"] for e in seen if e.kind == "flush"} - {e.data["plan"] for e in seen if e.kind == "plan"}
    known = [Event("plan", start, e.data, e.thread) for e in LOG.of("plan") if e.data["plan"] in wanted]
    return from_memory([*known, *seen], start)
