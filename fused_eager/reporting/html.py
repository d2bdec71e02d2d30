"""The report as one HTML page that needs nothing else: no network, no fonts, no scripts but its own."""

from __future__ import annotations

import collections
import functools
import linecache
import time
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import jinja2

from ..log.reasons import CODES, NOT_COMPILED
from .advice import Advice
from .facts import Facts, top
from .rows import Compile, Island, Line, Region, Sync
from .source import short, shorten, split
from .text import amount, duration, facts_lines, headline, times

BINS = 120  # columns of the timeline
CONTEXT = 2  # lines shown around those that ran ops
ROWS = 200  # of a table
COLOURS = 10  # regions that get a colour of their own; the stylesheet has as many
PLANS = 4  # that are drawn


@functools.cache
def templates() -> jinja2.Environment:
    """Where pages are made of their templates."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fused_eager.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, amount=amount, short=short)
    return environment


def page(f: Facts, advice: Sequence[Advice]) -> str:
    """The whole page."""
    return templates().get_template("page.html.j2").render(whole=True, **_model(f, advice))


def fragment(f: Facts, advice: Sequence[Advice]) -> str:
    """What a notebook shows: the run in a line, where the time went, and what to change."""
    return templates().get_template("page.html.j2").render(whole=False, **_model(f, advice))


def _model(f: Facts, advice: Sequence[Advice]) -> dict[str, Any]:
    sites = [*f.lines, *(s.site for s in f.syncs), *(c.site for c in f.compiles)]
    colours = _colours(f)
    start = f.processes[0].start if f.processes else {}
    cuts = [c for c in f.cuts if c.reason != "mode.single"]
    rows: dict[str, Sized] = {
        "regions": f.regions, "compilations": f.compiles, "waits": f.syncs, "cuts": cuts, "islands": f.islands,
        "choices": f.choices, "op_choices": f.op_choices, "modules": f.modules,
    }  # fmt: skip
    return {
        "facts": f,
        "headline": headline(f),
        "notes": facts_lines(f)[1:],
        "times": [(n, s, k) for (n, s), k in zip(times(f), KINDS, strict=True) if s > 0],
        "total": sum(s for _, s in times(f)) or 1.0,
        "program": " ".join(start.get("argv", [])) or "this process",
        "when": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(start["wall"])) + " UTC" if "wall" in start else "",
        "versions": start.get("versions", {}),
        "advice": [(a, shorten(a.title, sites), shorten(a.evidence, sites)) for a in advice],
        "bins": _bins(f),
        "files": _files(f, colours),
        "plans": _plans(f, colours),
        "regions": [(r, colours.get(id(r))) for r in top(f.regions, "count", ROWS)],
        "compiles": [(c, shorten(c.region, sites), shorten(c.why, sites)) for c in top(f.compiles, "seconds", ROWS)],
        "syncs": top(f.syncs, "waited", ROWS),
        "cuts": top(cuts, "count", ROWS),
        "islands": top(f.islands, "count", ROWS),
        "choices": list(f.choices.values())[:ROWS],
        "op_choices": f.op_choices[:ROWS],
        "modules": sorted(f.modules.items(), key=lambda item: (-item[1][1], -item[1][0]))[:ROWS],
        # How many rows a section leaves out.
        "left": collections.Counter({name: len(found) - ROWS for name, found in rows.items() if len(found) > ROWS}),
        "codes": CODES,
    }


KINDS = ("compile", "wait", "launch", "host", "meanwhile", "alone", "rest")


def _colours(f: Facts) -> dict[int, int]:
    """The regions that get a colour, by identity: those with most work. Equal lines, equal colour."""
    weight: dict[tuple[Any, ...], int] = {}
    for r in f.regions:
        weight[_lines_of(r)] = weight.get(_lines_of(r), 0) + r.count * r.ops
    order = sorted(weight, key=lambda key: -weight[key])[:COLOURS]
    return {id(r): order.index(_lines_of(r)) for r in f.regions if _lines_of(r) in order}


def _lines_of(r: Region) -> tuple[Any, ...]:
    return (r.how, *sorted({line for line, *_ in r.lines}))


# ---- the timeline ------------------------------------------------------------------------------------------------


def _bins(f: Facts) -> list[dict[str, float]]:
    """The run in columns: for each, the share of its time that went into each kind of thing (first process)."""
    if not f.processes or not f.seconds:
        return []
    spans = _spans(f)
    if not spans:
        return []
    begin, end = min(s[1] for s in spans), max(s[2] for s in spans)
    width = (end - begin) / BINS or 1.0
    bins: list[dict[str, float]] = [dict.fromkeys(KINDS, 0.0) for _ in range(BINS)]
    for kind, a, b in spans:
        first, last = int((a - begin) / width), min(int((b - begin) / width), BINS - 1)
        for i in range(max(first, 0), last + 1):
            left, right = begin + i * width, begin + (i + 1) * width
            bins[i][kind] += max(0.0, min(b, right) - max(a, left)) / width
    for i, column in enumerate(bins):
        column["at"] = i * width
        column["index"] = i
        whole = max(sum(column[k] for k in KINDS), 1.0)
        for kind in KINDS:
            column[kind] /= whole
    return bins


def _spans(f: Facts) -> list[tuple[str, float, float]]:
    """(kind, begin, end) of what the first process did, without overlaps."""
    out = []
    flushed = alone = 0.0
    for e in f.processes[0].events:
        d = e.data
        if e.kind == "compile" and d.get("waited", True):
            out.append(("compile", e.time - d["seconds"], e.time))
        elif e.kind == "flush":
            start = e.time - d["seconds"]
            out.append(("host", max(start - d["host"], alone), start))
            launched = start + d["compiling"] + d.get("native", 0.0)
            out.append(("meanwhile", start + d["compiling"], launched))
            out.append(("launch", launched, e.time))
            flushed = e.time
        elif e.kind == "bypass":
            kind = "meanwhile" if d.get("reason") in NOT_COMPILED else "alone"
            out.append((kind, e.time - d["seconds"], e.time))
            alone = e.time
        elif e.kind == "sync":
            out.append(("wait", max(e.time - d["seconds"], flushed), e.time))
    return [(kind, a, b) for kind, a, b in out if b > a]


# ---- the program -------------------------------------------------------------------------------------------------


def _files(f: Facts, colours: dict[int, int]) -> list[dict[str, Any]]:
    """Each file of the program with the lines that ran ops, and some around them."""
    marks: dict[str, dict[int, dict[str, Any]]] = {}
    by_line: dict[str, list[Region]] = {}
    for r in f.regions:
        for line, *_ in r.lines:
            by_line.setdefault(line, []).append(r)
    syncs = _by_site(s for s in f.syncs if s.reason != "cut.exit")
    again, islands = _by_site(f.again), _by_site(f.islands)
    for site in dict.fromkeys([*by_line, *syncs, *again, *islands]):
        file, number = split(site)
        if number:
            noted: list[list[Any]] = [rows.get(site, []) for rows in (by_line, syncs, again, islands)]
            marks.setdefault(file, {})[number] = _notes(f.lines.get(site), colours, *noted)
    out = []
    for file, lines in marks.items():
        text = linecache.getlines(file)
        if not text:
            continue
        weight = sum(len(m["regions"]) for m in lines.values())
        out.append({"name": _relative(file), "weight": weight, "blocks": _blocks(text, lines)})
    return sorted(out, key=lambda row: -row["weight"])


def _relative(file: str) -> str:
    return short(f"{file}:1").rpartition(":")[0]


def _by_site(rows: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row.site, []).append(row)
    return found


def _notes(
    row: Line | None,
    colours: dict[int, int],
    regions: list[Region],
    syncs: list[Sync],
    again: list[Compile],
    islands: list[Island],
) -> dict[str, Any]:
    warn = []
    if syncs:
        warn.append(f"waits {sum(s.count for s in syncs)}x, {duration(sum(s.waited for s in syncs))}")
    if again:
        warn.append(f"compiled again {len(again)}x, {duration(sum(c.seconds for c in again))}")
    if islands:
        warn.append("native: " + ", ".join(sorted({i.op for i in islands})))
    chosen = sorted({colours[id(r)] for r in regions if id(r) in colours})
    native = any(r.how == "aten" for r in regions)
    ops = ", ".join(f"{op.removeprefix('aten.')} x{n}" for op, n in row.ops.most_common(12)) if row else ""
    return {
        "regions": chosen,
        "native": native,
        "ops": sum(row.ops.values()) if row else 0,
        "backward": row.backward if row else 0,
        "names": ops,
        "modules": ", ".join(sorted(row.modules)[:4]) if row else "",
        "device": row.device if row else 0.0,
        "warn": "; ".join(warn),
    }


def _blocks(text: list[str], lines: dict[int, dict[str, Any]]) -> list[list[tuple[int, str, dict[str, Any] | None]]]:
    shown = sorted({n for at in lines for n in range(at - CONTEXT, at + CONTEXT + 1) if 1 <= n <= len(text)})
    blocks: list[list[tuple[int, str, dict[str, Any] | None]]] = []
    for n in shown:
        if not blocks or blocks[-1][-1][0] != n - 1:
            blocks.append([])
        blocks[-1].append((n, text[n - 1].rstrip("\n"), lines.get(n)))
    return blocks


def _plans(f: Facts, colours: dict[int, int]) -> list[dict[str, Any]]:
    """The plans that ran most work, each with its regions in order."""
    rows: dict[tuple[int, int], list[Region]] = {}
    for r in f.regions:
        if r.count:
            rows.setdefault(r.plan, []).append(r)
    order = sorted(rows, key=lambda plan: -sum(r.count * r.ops for r in rows[plan]))[:PLANS]
    return [
        {"number": plan[1], "count": rows[plan][0].count, "regions": [(r, colours.get(id(r))) for r in rows[plan][:30]]}
        for plan in order
    ]
