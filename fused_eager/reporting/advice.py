"""Advice: what to change in the program, where, and how much time of this run it would have saved.

Each finder looks at the facts for one kind of mistake. The seconds are measured ones: of waits, and of compilations
that another form of the program would not need; where only a bound is known, the text says "up to" or "at least".
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..log.reasons import CODES, NOT_FUSED, OUTSIDE
from . import between_ranks
from .facts import Facts
from .finding import NOTABLE, OFTEN, STEADY, Advice
from .rows import Compile, Cut, Island, Region, Sync
from .source import short, statement


def advise(facts: Facts) -> list[Advice]:
    """All advice, most time to gain first."""
    found = [advice for finder in FINDERS for advice in finder(facts)]
    return sorted(found, key=lambda a: -a.seconds)


# ---- waits -------------------------------------------------------------------------------------------------------

_RANDOM = "draws random numbers"
_WAITS = ("sync.value", "sync.check", "sync.memory", "sync.shape", "sync.thread", "sync.call", "sync.fork")
KEEP = "keep the tensors (`.detach()`) in a list and read them once after the loop, or read only every 100th step"


@dataclass(frozen=True, slots=True)
class Wait:
    """A form in which programs wait: `matches` (detail, source) says whether it is this one."""

    kind: str
    matches: Callable[[str, str], bool]
    title: str
    cure: str


def _has(*patterns: str) -> Callable[[str, str], bool]:
    return lambda detail, source: any(re.search(p, source) for p in patterns)


# In this order: the first that matches is taken.
WAITS: tuple[Wait, ...] = (
    Wait(
        "print",
        lambda detail, source: "__repr__" in detail or bool(re.search(r"print\(|\b[fF][\"'].*\{", source)),
        "printing a tensor waits for its value",
        f"print less often: {KEEP}",
    ),
    Wait(
        "numpy",
        lambda detail, source: "numpy" in detail or "__array__" in detail or "__dlpack__" in detail,
        "handing a tensor to NumPy waits for its value",
        "keep the data as tensors inside the loop, and convert once after it (torch.stack(kept).numpy())",
    ),
    Wait(
        "branch",
        lambda detail, source: bool(re.match(r"(if|elif|while|assert)\b", source))
        and not re.search(r"\.item\(|\.tolist\(|\bfloat\(|\bint\(", source),
        "a branch on a tensor's value waits for it, and cuts the work in two",
        "compute both cases and choose with torch.where (or a mask), so that Python need not know the value",
    ),
    Wait(
        "item",
        _has(r"\.item\(", r"\bfloat\(", r"\bint\(", r"\bbool\(", r"\.tolist\("),
        "reading a number waits for it",
        KEEP,
    ),
    Wait(
        "shape",
        lambda detail, source: any(name in detail for name in ("nonzero", "masked_select", "unique", "index.Tensor")),
        "the size of this result depends on values, which have to be waited for",
        "keep a fixed size: torch.where(mask, x, 0), or multiply by the mask, instead of selecting",
    ),
    Wait("value", lambda detail, source: True, "this line waits for a value", KEEP),
)

DRAW = Wait(
    "random",
    lambda detail, source: _RANDOM in detail,
    "drawing from a distribution that was computed waits for it",
    "draw uniform numbers (torch.rand) before the loop, and compare them with the computed probabilities inside",
)


def _waits(facts: Facts) -> Iterator[Advice]:
    by_site: dict[str, list[Sync]] = {}
    for sync in facts.syncs:
        if sync.reason in _WAITS or _RANDOM in sync.detail:
            by_site.setdefault(sync.site, []).append(sync)
    for site, syncs in by_site.items():
        count = max(s.count for s in syncs)
        waited = sum(s.waited for s in syncs)
        rounds = max(s.rounds for s in syncs)
        if rounds < 3 or (rounds < OFTEN * facts.steps and waited < NOTABLE * facts.seconds):
            continue
        source = statement(site)
        worst = max(syncs, key=lambda s: s.waited)
        if worst.reason == "sync.shape":
            row = next(w for w in WAITS if w.kind == "shape")
        elif _RANDOM in worst.detail:
            row = DRAW
        elif worst.reason in ("sync.value", "sync.memory"):
            row = next(w for w in WAITS if w.matches(worst.detail, source))
        else:
            code = CODES[worst.reason]
            row = Wait(worst.reason, lambda d, s: True, code.meaning, code.hint)
        per = f", {count / facts.steps:.3g} per step" if facts.steps else ""
        evidence = (
            f"{count} waits{per}, {_ms(waited / count)} each, {_ms(max(s.longest for s in syncs))} at most "
            f"({worst.reason}, {worst.detail})"
        )
        yield Advice(f"wait.{row.kind}", site, row.title, row.cure, waited, evidence)


# ---- compilations ------------------------------------------------------------------------------------------------


def _again(facts: Facts) -> Iterator[Advice]:
    groups: dict[tuple[object, str], list[Compile]] = collections.defaultdict(list)
    for c in facts.forms:
        groups[c.cause, c.site].append(c)
    unstable = dict(enumerate(_unstable(facts)))  # of which each belongs to the first group that it touches
    touching = _by_line(facts, unstable)
    for (cause, site), group in groups.items():
        seconds = sum(c.seconds for c in group)
        mine = [unstable.pop(i) for i in touching.get(site, ()) if i in unstable]
        lost = [cut for cut, _ in mine]
        does = any(facts.lengths.get(line) == "" for line in {site, *(line for _, line in mine)})
        if cause == "shape" and does and sum(cut.count for cut in lost) <= OFTEN * facts.steps:
            continue  # one executable does for all of them since
        if cause == "ops" and len(group) < 3:
            continue  # a first round that differs, as that of most optimizers does
        if cause in ("liveness", "donation", "layout") and len(group) < 2:
            continue  # likewise
        ranks = all(what.startswith("shape of") for c in group for what, *_ in c.changes) and len(group) < 3
        steady = not lost and all(c.runs >= STEADY * facts.steps for c in group)
        if cause == "shape" and (ranks or steady):
            continue  # parts of one round that differ (parameters of two shapes), not a round that changes
        kind, title, cure = _form(facts, str(cause), group, lost)
        if group[-1].waited:
            evidence = f"compiled again {_times(len(group))} for {seconds:.1f} s: {group[-1].why}"
        else:
            forms = "one further form" if len(group) == 1 else f"{len(group)} further forms"
            evidence = f"came in {forms}, which took {_ms(seconds)} on ATen: {group[-1].why}"
        if lost:
            count, extra = sum(c.count for c in lost), sum(c.seconds for c in lost)
            evidence += f"; {count} further rounds were not worth compiling and ran on ATen"
            evidence += _each_alone(facts, {line for _, line in mine})
            seconds += extra
        yield Advice(kind, site, title, cure, seconds, evidence)
    for cut, site in unstable.values():
        yield Advice(
            "shape.unstable",
            site,
            "these ops keep coming with other shapes, so they run on ATen",
            CODES["region.unstable"].hint,
            cut.seconds,
            f"{cut.count} rounds, {cut.ops} ops{_each_alone(facts, {site})}",
        )


def _each_alone(facts: Facts, sites: Collection[str]) -> str:
    """Why ops that begin at these lines are not run block by block, by one executable for all lengths."""
    why = sorted({facts.lengths[site] for site in sites if facts.lengths.get(site)})
    return f"; one executable does not do for all: {', '.join(why)}" if why else ""


def _form(facts: Facts, cause: str, group: Sequence[Compile], lost: Sequence[Cut]) -> tuple[str, str, str]:
    """Kind, title and cure of compilations of one cause at one line."""
    if cause != "shape":
        return f"compile.{cause}", *_OTHER[cause]
    what, sizes = _sizes(group)
    # What has been left behind does not come back; sizes that take turns do.
    passing = sum(c.runs for c in group) < 2 * len(group)
    if len(sizes) >= 3 and passing and (sizes == sorted(set(sizes)) or sizes == sorted(set(sizes), reverse=True)):
        return (
            "shape.growing",
            f"{what} grows from round to round ({_few(sizes)}), and each size is another computation",
            "allocate the full size once before the loop, write each round's part into it (buffer[:, i] = ..., or "
            "index_copy_), and mask what is not there yet",
        )
    is_smaller = len(group) == 1 and not lost and sizes[-1] < sizes[0]
    if is_smaller and sum(c.runs for c in _of_first_sizes(facts, group[0])) > 2 * group[0].runs:
        return (
            "shape.last",
            f"an odd batch ({what} is {sizes[-1]} instead of {sizes[0]}) is another computation",
            "leave it out (DataLoader(..., drop_last=True)), or pad it to the size of the others",
        )
    distinct = sorted(set(sizes))
    return (
        "shape.changing",
        f"{what} changes between {len(distinct)} sizes ({_few(distinct)}), and each is another computation",
        "pad to one size, or to a few fixed ones (buckets); if a Python number decides the size, round it",
    )


_OTHER = {
    "dtype": ("a dtype changes from round to round", "convert once, before the loop"),
    "argument": (
        "a Python number that changes is part of the computation (a size, a dimension, a count)",
        "keep it fixed, or turn it into data: a tensor that is compared with, instead of a size that is sliced by",
    ),
    "layout": ("strides or offsets change from round to round", "make the tensor contiguous, or slice in fixed steps"),
    "liveness": (
        "other tensors stay alive from round to round, so other results have to be handed out",
        "keep the same tensors in every round, and only `.detach()`ed copies of what is logged",
    ),
    "donation": ("memory may be reused in some rounds, not in others", "hold no reference to old values in the loop"),
    "option": ("the options of the lowering change", "use one context with one set of options"),
    "ops": (
        "Python takes another way through the program from round to round",
        "let the rounds run the same ops: torch.where instead of `if` on values, fixed numbers of layers and steps",
    ),
}


def _sizes(group: Sequence[Compile]) -> tuple[str, list[Any]]:
    """The dimension that changes in most of a group, and its sizes in the order in which they came."""
    counts = collections.Counter(what for c in group for what, *_ in c.changes)
    what = counts.most_common(1)[0][0] if counts else "a shape"
    sizes: list[Any] = []
    for c in group:
        for name, before, now in c.changes:
            if name == what:
                sizes += [before] if not sizes else []
                sizes.append(now)
    numbers = [s for s in sizes if isinstance(s, int)]
    return what, list(numbers if len(numbers) == len(sizes) else map(str, sizes))


def _of_first_sizes(facts: Facts, c: Compile) -> list[Compile]:
    """What came of the sizes that a compilation's ops had when they came first, other values live or not."""
    rows = [f for f in [*facts.compiles, *facts.came] if f.skeleton == c.skeleton]
    return [f for f in rows if f.variant == 1 or f.cause in ("liveness", "donation", "layout")]


def _unstable(facts: Facts) -> list[tuple[Cut, str]]:
    """Flushes that ATen ran because their shapes are new, with the line where their ops begin."""
    by_plan: dict[tuple[int, int], Region] = {r.plan: r for r in facts.regions if r.ended_by == "region.unstable"}
    rows = []
    for cut in facts.cuts:
        plans = [p for p in cut.plans if p in by_plan]
        if plans:
            region = by_plan[plans[0]]
            # Of the cut's flushes, those that were unstable.
            share = sum(by_plan[p].count for p in plans) / cut.count
            part = Cut(cut.reason, cut.detail, cut.site, round(cut.count * share), cut.ops, cut.seconds * share)
            part.plans.update(plans)
            rows.append((part, region.site or region.lines[0][0]))
    return rows


def _by_line(facts: Facts, rows: Mapping[int, tuple[Cut, str]]) -> dict[str, list[int]]:
    """The numbers of rows by the lines that they touch: where their ops begin, and all that their plans are made of."""
    lines: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
    for region in facts.regions:
        lines[region.plan].update(line for line, *_ in region.lines)
    found: dict[str, list[int]] = collections.defaultdict(list)
    for number, (cut, site) in rows.items():
        for line in {site}.union(*(lines[plan] for plan in cut.plans)):
            found[line].append(number)
    return found


# ---- islands and the rest ----------------------------------------------------------------------------------------


def _outside(facts: Facts) -> Iterator[Advice]:
    """Modes of the program's around the context, which every op is left to."""
    by_mode: dict[str, list[Island]] = collections.defaultdict(list)
    for island in facts.islands:
        if island.reason.endswith(OUTSIDE):
            by_mode[island.reason.removesuffix(OUTSIDE).strip()].append(island)
    for mode, islands in by_mode.items():
        most = max(islands, key=lambda island: island.count)
        yield Advice(
            "outside",
            most.site,
            f"nothing is fused where a {mode} is active outside the context",
            "enter it inside the context, where it sees the ops before they are recorded, or do without it",
            sum(island.seconds for island in islands),
            f"{sum(island.count for island in islands)} ops ran natively because of it",
        )


def _islands(facts: Facts) -> Iterator[Advice]:
    groups: dict[tuple[str, str], list[str]] = {}
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for island in facts.islands:
        if island.reason.endswith((OUTSIDE, NOT_FUSED)):
            continue
        key = island.op, island.site
        groups.setdefault(key, []).append(island.reason)
        seconds[key] += island.seconds
        counts[key] += island.count
    native = [r for r in facts.regions if r.how == "aten" and r.ended_by != "region.unstable"]
    places = [(r, (op, line)) for r in native for line, _, _, ops in r.lines for op in ops if (op, line) in groups]
    per_plan = collections.Counter(r.plan for r, _ in places)
    for region, key in places:
        counts[key] += region.count
        # Launching such a plan waits for what the island reads: an upper bound of what it costs.
        seconds[key] += facts.launches.get(region.plan, 0.0) / per_plan[region.plan]
    for (op, site), reasons in groups.items():
        if counts[op, site] < max(3, OFTEN * facts.steps):
            continue
        yield Advice(
            "island",
            site,
            f"{op} runs natively, between two regions",
            "write it with ops that have a lowering (the command `ops` lists them), or move it out of the loop",
            seconds[op, site],
            f"{counts[op, site]} times, up to {_ms(seconds[op, site] / counts[op, site])} each with the waiting for "
            f"what it reads; {reasons[-1]}",
        )


def _rebuilt(facts: Facts) -> Iterator[Advice]:
    for row in facts.built:
        if row.late >= 3 and row.late >= OFTEN * facts.steps:
            yield Advice(
                "rebuilt",
                row.site,
                f"this line builds a module ({row.module}) in every round",
                "build it once before the loop: new parameters are drawn each time, and none of them is ever trained",
                row.seconds,
                f"built {row.count} times",
            )


def _tiny_flushes(facts: Facts) -> Iterator[Advice]:
    for cut in facts.cuts:
        if cut.reason in ("cut.options", "cut.exit") and cut.count >= max(3, OFTEN * facts.steps):
            code = CODES[cut.reason]
            yield Advice(
                cut.reason, cut.site, code.meaning + " in every round", code.hint, cut.seconds, f"{cut.count} times"
            )


def _failed(facts: Facts) -> Iterator[Advice]:
    for failure in facts.failures:
        yield Advice(
            "compile-failed",
            failure["site"],
            f"XLA could not compile {failure['ops']} ops, so ATen runs them",
            "please report it, with this text",
            0.0,
            failure["error"][:300],
        )


def _wrong(facts: Facts) -> Iterator[Advice]:
    for found in facts.mismatches:
        yield Advice(
            "mismatch",
            found["site"],
            f"{found['op']} gave another result than ATen's",
            f"please report it, with the script that repeats it ({found['script'] or 'none could be written'}); until "
            'then, mode="off" around these lines is right',
            math.inf,
            found["difference"],
        )


FINDERS: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    _wrong,
    _waits,
    _again,
    _outside,
    _islands,
    _rebuilt,
    _tiny_flushes,
    _failed,
    *between_ranks.FINDERS,
)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _few(values: Sequence[object]) -> str:
    shown = [str(v) for v in values]
    return ", ".join(shown if len(shown) <= 5 else [*shown[:3], "...", shown[-1]])


__all__ = ["FINDERS", "WAITS", "Advice", "advise", "short"]
