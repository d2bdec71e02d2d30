"""The report as text: one screen, what to change first."""

from __future__ import annotations

import collections
import os
import statistics
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from .advice import Advice
from .facts import Facts, top
from .source import short, shorten, split

WIDTH = 110
ADVICE, ROWS = 4, 4  # how many of each are shown


def duration(seconds: float) -> str:
    """Seconds with a fitting unit and three digits; infinity stands for what no time can be weighed against."""
    if seconds == float("inf"):
        return "wrong"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def amount(nbytes: float) -> str:
    """Bytes with a fitting unit."""
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def count(number: int, noun: str, many: str = "") -> str:
    """A number of things."""
    return f"{number} {noun}" if number == 1 else f"{number} {many or noun + 's'}"


def times(f: Facts) -> list[tuple[str, float]]:
    """Where the host's time went, in parts that do not overlap; the last is what is left."""
    rows = [
        ("compiling", f.compile),
        ("waiting for values", f.wait),
        ("planning and launching", f.launch),
        ("the program itself, with recording", f.host),
        ("torch, where nothing was compiled", f.meanwhile),
        ("torch alone, which was measured to be faster", f.bypassed),
    ]
    rest = f.seconds * max(len(f.processes), 1) - sum(s for _, s in rows)
    return [*rows, ("outside of any context", max(rest, 0.0))]


def headline(f: Facts) -> str:
    """The run in a line."""
    steps = f", {count(f.steps, 'round')} ({f.steps / f.seconds:.3g}/s)" if f.steps and f.seconds else ""
    many = f"{len(f.processes)} processes, " if len(f.processes) > 1 else ""
    if f.forgotten:
        last = f"the last {f.ran('xla') + f.ran('aten')} of them in {count(f.runs, 'region')}"
        return f"{many}{duration(f.seconds)}{steps}; {count(f.ops, 'op')} ran, {last}"
    return f"{many}{duration(f.seconds)}{steps}; {count(f.ops, 'op')} ran in {count(f.runs, 'region')}"


def fused_line(f: Facts) -> str:
    """How much of the run was fused, and what became of the rest."""
    fused, native = f.ran("xla"), f.ran("aten")
    parts = []
    if fused + native:
        of = f"the {count(fused + native, 'op')} that were recorded"
        parts.append(f"{fused / (fused + native):.0%} of {of} ran in compiled regions")
    if f.turns:
        what = "all rounds" if f.turns >= f.steps else f"{f.turns} of {count(f.steps, 'round')}"
        why = {0: "as that is faster", f.turns: "as nothing was compiled for them"}
        both = f"{f.turns - f.waiting} as that is faster, {f.waiting} as nothing was compiled for them"
        parts.append(f"{what} ran on torch alone, unrecorded, {why.get(f.waiting, both)}")
    return "; ".join(parts)


def facts_lines(f: Facts) -> list[str]:
    """What there is to know besides the advice, in short lines."""
    total = sum(s for _, s in times(f)) or 1.0
    shares = [f"{duration(s)} {name} ({s / total:.0%})" for name, s in times(f) if s / total > 0.005]
    lines = ["time: " + ", ".join(shares)] if shares else []
    if f.forgotten:
        lines.append(
            f"rows: of the last {count(f.flushes - f.forgotten, 'flush', 'flushes')}; only times and the number of ops "
            f"tell of the {f.forgotten} before (`run --report` and report=FILE keep all)"
        )
    fused = fused_line(f)
    if fused:
        lines.append(f"fused: {fused}")
    if f.rests > f.flushes:
        lines.append(
            "unrecorded: most of it so far, as writing ops down may take a quarter of the time and no more; "
            "`run --report` and report=FILE record all of it"
        )
    if f.compiles:
        again = len(f.again)
        behind = f" ({duration(f.behind)} of it while the program went on)" if f.behind else ""
        lines.append(
            f"compiled: {count(len(f.compiles), 'region')} in {duration(f.compiling_in_all)}{behind}, {again} of them "
            "in another form of ops that had been compiled before"
        )
    if f.loads:
        spent, saved = sum(d["seconds"] for d in f.loads), sum(d["saved"] for d in f.loads)
        lines.append(
            f"loaded: {count(len(f.loads), 'region')} from the compile cache in {duration(spent)}; compiling them had "
            f"taken {duration(saved)}"
        )
    if f.refused:
        first = f.refused[0]
        lines.append(
            f"not kept: {count(len(f.refused), 'region')}, which the next process will have to compile again; "
            f"{first['region']}: {first['detail']}"
        )
    lines += _unkept(f)
    for device, ops in f.on_other_devices.items():
        lines.append(f"other devices: {count(ops, 'op')} ran natively on {device}, which is not fused")
    inner = sum(r.data["inner_bytes"] * r.count for r in f.regions if r.how == "xla")
    donated = sum(r.data["donated_bytes"] * r.count for r in f.regions)
    scratch = sum(r.data.get("scratch_bytes", 0) * r.count for r in f.regions)
    if inner:
        lines.append(
            f"memory: {amount(inner)} of intermediates never written, {amount(donated)} reused in place"
            + (f", {amount(scratch)} of large results where dead ones were" if scratch else "")
            + (f", at most {amount(f.peak)} resident" if f.peak else "")
        )
    if f.recording_per_op:
        lines.append(f"recording: {duration(f.recording_per_op)} per op (sampled)")
    sampled = [r for r in f.regions if r.total is not None]
    if sampled:
        busy = sum(r.total or 0.0 for r in sampled)
        lines.append(f"device: about {duration(busy)} of work (sampled; beside the host's time, not part of it)")
    return lines


def _unkept(f: Facts) -> list[str]:
    """Why the compile cache, or a store of it, keeps nothing: a line for each, with the first cause."""
    lines = []
    causes = {d["folder"]: d["detail"] for d in reversed(f.unusable)}
    for folder, detail in causes.items():
        where = f" in {folder}" if folder else ""
        lines.append(
            f"not kept: anything, as the compile cache cannot be used{where}: {detail}; every process compiles anew "
            "until cache_dir (FUSED_EAGER_CACHE_DIR) names a folder that is yours alone"
        )
    failed: dict[str, list[dict[str, Any]]] = {}
    for d in f.unwritten:
        if d["tier"] != "local" or not causes:
            failed.setdefault(d["tier"], []).append(d)
    for tier, each in failed.items():
        # A store that failed too often is not asked for a while; why it failed was told before.
        first = next((d for d in each if d["code"] != "breaker-open"), each[0])
        lines.append(f"not kept: {count(len(each), 'entry', 'entries')} in the cache's store {tier}: {first['detail']}")
    return lines


def show(text: str) -> None:
    """Print for a reader who may have seen enough (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would complain once more at its end, when it flushes what nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _wrap(indent: str, words: str) -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def render(f: Facts, advice: Sequence[Advice]) -> str:
    """The whole text."""
    sites = [*f.lines, *(s.site for s in f.syncs), *(c.site for c in f.compiles)]
    lines = [f"fused_eager: {headline(f)}", *("  " + line for line in facts_lines(f))]
    if f.compiling:
        lines.append(f"  the log ends while compiling {shorten(f.compiling, sites)}")
    if f.broken:
        lines.append(f"  {f.broken} lines of the log could not be read")
    if advice:
        lines += ["", "What to change, most time to gain first:"]
        for number, a in enumerate(advice[:ADVICE], 1):
            lines.append(f"{number:2}. {short(a.site)}  {duration(a.seconds)}: {shorten(a.title, sites)}")
            if a.source:
                lines.append(f"      > {a.source[: WIDTH - 8]}")
            lines += _wrap("      ", f"Cure: {a.cure}.")
            lines += _wrap("      ", f"Seen: {shorten(a.evidence, sites)}.")
        if len(advice) > ADVICE:
            lines.append(f"    and {len(advice) - ADVICE} more")
    elif f.flushes:
        lines += ["", "Nothing to change: no line waits in every round, nothing was compiled twice without need."]
        if f.turns > f.steps / 2:
            late = f.waiting > f.turns / 2
            why = "nothing was compiled for them" if late else "that was measured to be faster"
            lines.append(f"Most rounds ran on torch alone: {why}.")
    lines += _tables(f, sites)
    return "\n".join(lines)


def _tables(f: Facts, sites: list[str]) -> list[str]:
    lines = []
    cuts = [c for c in f.cuts if c.reason != "mode.single"]
    if cuts:
        lines += ["", "Where work was cut (flushes, ops each, reason):"]
        for cut in top(cuts, "count", ROWS):
            where = short(cut.site) if split(cut.site)[1] else "-"
            lines.append(f"  {cut.count:6} x {cut.ops / cut.count:6.0f} ops  {where:<28} {cut.reason} {cut.detail}")
    if f.compiles:
        lines += ["", "Longest compilations:"]
        for c in top(f.compiles, "seconds", ROWS):
            lines.append(f"  {duration(c.seconds):>8}  {shorten(c.region, sites)}: {shorten(c.why, sites)}"[:WIDTH])
    if f.islands:
        lines += ["", "Ops that ran natively:"]
        for i in top(f.islands, "count", ROWS):
            lines.append(f"  {i.count:6} x {i.op} at {short(i.site)}: {i.reason}"[:WIDTH])
    if f.collectives:
        lines += ["", "Collectives (how often, and what one takes on average):"]
        skews = _skews(f)
        for each in top(list(f.collectives.values()), "seconds", ROWS):
            took, fetching, waiting = (duration(of / each.count) for of in (each.seconds, each.fetch_s, each.wait_s))
            group = f"{each.ranks} ranks" + (f" of group {each.group}" if each.group not in ("", "0") else "")
            lines.append(f"  {each.count:6} x {each.op} at {short(each.site)} ({group})"[:WIDTH])
            what = f"{amount(each.bytes / each.count)} in {took} ({amount(each.rate)}/s), fetching {fetching}"
            if each.overlap is not None:
                what += f", waiting {waiting}, overlap {100 * each.overlap:.0f} %"
            skew = skews.get((each.group, each.site))  # takes the logs of all ranks
            lines.append(f"           {what}" + (f", skew {duration(statistics.fmean(skew))}" if skew else ""))
        if f.agreed:
            inside, cut = (sum(d["collectives"] for d in f.agreed if d["together"] is way) for way in (True, False))
            lines.append(f"  {inside} ran inside of regions, and {cut} by themselves, where ranks differed")
            lines.append(f"           to know that took {duration(sum(d['wait_s'] for d in f.agreed))}")
    if f.choices:
        lines += ["", 'The faster way, measured (fused has to win by 5 %; native="never" always fuses):']
        for c in list(f.choices.values())[:ROWS]:
            way, times = "native" if c["native"] else "fused", (duration(c["fused_s"]), duration(c["native_s"]))
            words = f"from {short(c['site'])} to the next read: {times[0]} fused, {times[1]} natively"
            words += " (remembered)" if c.get("remembered") else ""
            lines.append(f"  {way:<6}  {words}"[:WIDTH])
    if f.op_choices:
        lines += ["", "Calls that ATen runs between regions, as it is faster there (measured):"]
        for c in sorted(f.op_choices, key=lambda c: c["native_s"] - c["fused_s"])[:ROWS]:
            both = f"{duration(c['native_s'])} on ATen, {duration(c['fused_s'])} through XLA"
            lines.append(f"  {c['op']} at {short(c['site'])}: {both}"[:WIDTH])
    return lines


def _skews(f: Facts) -> dict[tuple[str, str], list[float]]:
    """Of the collectives by group and line, where all ranks have told of them."""
    found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for (group, _), met in f.met.items():
        if met.skew is not None:
            found[group, met.site].append(met.skew)
    return found
