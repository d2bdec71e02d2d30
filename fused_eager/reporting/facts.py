"""Facts: an event log added up. Rows and sums only; what to make of them is for `advice`.

Times are seconds. `host` is the program's own Python with torch's dispatch and the recording in it; `launch` is
planning and starting regions; `wait` is what the program waited for values; none of them includes another, or
`compile`. The device works beside all of them: its time is known from samples (`Region.alone`) only.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..log.events import Event
from ..log.reasons import NOT_COMPILED, NOT_FUSED
from .reading import Process
from .rows import Built, Collective, Compile, Cut, Island, Line, Met, Region, Sync

Where = tuple[str, str, str]  # reason code, detail, site

SIZES = 64  # that are kept of each collective
MET = 20000  # collectives that are compared between ranks: the first ones of each
# Events that are kept as they are, and where.
_KEPT = {
    "agreement": "agreed", "cache-load": "loads", "cache-refused": "refused", "cache-unusable": "unusable",
    "cache-write-failed": "unwritten", "mismatch": "mismatches",
}  # fmt: skip


@dataclass
class Facts:
    """Everything a report is made of."""

    processes: list[Process] = field(default_factory=list)
    seconds: float = 0.0
    host: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    compile: float = 0.0  # that the program waited for
    ops: int = 0
    flushes: int = 0
    steps: int = 0
    bypassed: float = 0.0  # torch alone, which is faster
    meanwhile: float = 0.0  # ATen op by op, or torch alone, as nothing was compiled for these ops
    turns: int = 0  # of the loop, while torch was alone,
    waiting: int = 0  # and how many of them because nothing was compiled
    rests: int = 0  # how often writing ops down had to wait
    recording: tuple[int, float] = (0, 0.0)  # sampled: ops, seconds
    peak: int = 0
    cuts: list[Cut] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    compiles: list[Compile] = field(default_factory=list)
    came: list[Compile] = field(default_factory=list)  # streams in forms that were new; their seconds are ATen's
    regions: list[Region] = field(default_factory=list)
    lines: dict[str, Line] = field(default_factory=dict)
    islands: list[Island] = field(default_factory=list)
    # Why no one executable does for all lengths of the ops that begin at a line; empty where one does.
    lengths: dict[str, str] = field(default_factory=dict)
    launches: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds of flushes, by plan
    loads: list[dict[str, Any]] = field(default_factory=list)  # from the compile cache
    refused: list[dict[str, Any]] = field(default_factory=list)  # by it
    unusable: list[dict[str, Any]] = field(default_factory=list)  # why its folder, or all of it, is of no use
    unwritten: list[dict[str, Any]] = field(default_factory=list)  # entries that a store of it did not take
    agreed: list[dict[str, Any]] = field(default_factory=list)  # whether collectives ran inside of regions
    failures: list[dict[str, Any]] = field(default_factory=list)
    mismatches: list[dict[str, Any]] = field(default_factory=list)  # what `verify` found
    built: list[Built] = field(default_factory=list)
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)  # fused or native, as last measured, by line
    collectives: dict[tuple[str, str, str], Collective] = field(default_factory=dict)  # by op, line and group
    met: dict[tuple[str, int], Met] = field(default_factory=dict)  # collectives by group and number
    op_choices: list[dict[str, Any]] = field(default_factory=list)  # calls that ATen runs, as it is faster there
    compiling: str = ""  # what was being compiled when the log ended
    forgotten: int = 0  # flushes that only times and the number of ops tell of
    broken: int = 0

    @property
    def runs(self) -> int:
        """How often a region ran."""
        return sum(r.count for r in self.regions)

    def ran(self, how: str) -> int:
        """How many ops ran in regions of one kind, "xla" (fused) or "aten" (natively), each time counted."""
        return sum(r.count * r.ops for r in self.regions if r.how == how)

    @property
    def compiling_in_all(self) -> float:
        """Seconds of compiling, waited for or not."""
        return sum(c.seconds for c in self.compiles)

    @property
    def behind(self) -> float:
        """Seconds of compiling in the background."""
        return sum(c.seconds for c in self.compiles if not c.waited)

    @property
    def again(self) -> list[Compile]:
        """Compilations of ops that had been compiled before in another form."""
        return [c for c in self.compiles if c.cause != "first"]

    @property
    def on_other_devices(self) -> dict[str, int]:
        """Ops on each device that is not fused."""
        out: collections.Counter[str] = collections.Counter()
        for island in self.islands:
            if island.reason.endswith(NOT_FUSED):
                out[island.reason.removesuffix(NOT_FUSED).strip()] += island.count
        return dict(out)

    @property
    def forms(self) -> list[Compile]:
        """Other forms of what had come before that the program paid for: it waited for their compilation, or ATen ran
        them until they were compiled.
        """
        return [c for c in self.again if c.waited] + [c for c in self.came if c.cause != "first"]

    @property
    def modules(self) -> dict[str, tuple[int, float]]:
        """Ops and share of the sampled device time, over all rounds, by module path; gradients count for theirs."""
        out: dict[str, tuple[int, float]] = {}
        for region in self.regions:
            each = (region.total or 0.0) / max(region.ops, 1)
            for _, module, _, ops in region.lines:
                if module:
                    n = sum(ops.values())
                    had = out.get(module, (0, 0.0))
                    out[module] = had[0] + n * region.count, had[1] + n * each
        return out

    @property
    def recording_per_op(self) -> float | None:
        """Seconds that recording one op takes, from samples."""
        ops, seconds = self.recording
        return seconds / ops if ops else None


class Adder:
    """Adds up events one by one, so that a report can follow a log that is still being written."""

    def __init__(self) -> None:
        self.facts = Facts()
        self._cuts: dict[Where, Cut] = {}
        self._syncs: dict[Where, Sync] = {}
        self._islands: dict[tuple[str, str, str], Island] = {}
        self._islands_at: dict[tuple[str, str], list[Island]] = {}
        self._built: dict[str, Built] = {}
        self._plans: dict[tuple[int, int], list[Region]] = {}
        self._flushed: collections.Counter[tuple[int, int]] = collections.Counter()
        self._reasons: collections.Counter[tuple[str, str]] = collections.Counter()
        self._new: dict[tuple[int, int], list[Compile]] = {}  # compiled, and waiting for their plan, by thread
        self._forms: dict[tuple[int, int], Compile] = {}  # by plan
        self._by_code: dict[tuple[int, int], Compile] = {}
        self._nested: dict[tuple[int, int], list[tuple[float, float]]] = {}  # flushes since the last sync
        self._bypassed_s: dict[tuple[int, int], float] = {}
        self._spans: dict[int, tuple[float, float]] = {}
        self._waits = 0.0  # seconds, with the flushes on the way

    def add(self, process: int, event: Event) -> None:
        """Take in one event of the process with this number."""
        begin, end = self._spans.get(process, (event.time, event.time))
        self._spans[process] = (min(begin, event.time), max(end, event.time))
        if event.kind in _KEPT:
            getattr(self.facts, _KEPT[event.kind]).append(event.data)
            return
        handle = getattr(self, "_" + event.kind.replace("-", "_"), None)
        if handle is not None:
            handle(process, event, event.data)

    def _flush(self, process: int, event: Event, d: dict[str, Any]) -> None:
        f = self.facts
        f.flushes += 1
        f.ops += d["ops"]
        f.host += max(d["host"] - self._bypassed_s.pop((process, event.thread), 0.0), 0.0)
        native = d.get("native", 0.0)
        f.launch += d["seconds"] - d["compiling"] - native
        f.meanwhile += native
        begin, end = self._spans[process]
        self._spans[process] = (min(begin, event.time - d["seconds"] - d["host"]), end)
        where = d["reason"], d["detail"], d["site"]
        cut = self._cuts.get(where)
        if cut is None:
            cut = self._cuts[where] = Cut(*where)
            f.cuts.append(cut)
        cut.count += 1
        cut.ops += d["ops"]
        cut.seconds += d["seconds"] - d["compiling"]
        plan = process, d["plan"]
        cut.plans.add(plan)
        f.launches[plan] = f.launches.get(plan, 0.0) + d["seconds"] - d["compiling"]
        self._flushed[plan] += 1
        self._reasons[d["reason"], d["site"]] += 1
        form = self._forms.get(plan)
        if form is not None:
            form.runs += 1
        for region in self._plans.get(plan, ()):
            region.count += 1
            if form is not None and region.ended_by == "region.new":
                form.seconds += d["seconds"]
            compiled = self._by_code.get((process, region.data.get("code", -1)))
            if compiled is not None:
                compiled.runs += 1
        nested = self._nested.setdefault((process, event.thread), [])
        nested.append((event.time, d["seconds"]))
        del nested[:-64]

    def _sync(self, process: int, event: Event, d: dict[str, Any]) -> None:
        nested = self._nested.pop((process, event.thread), [])
        # A flush on the way has been counted as such, its compilations too.
        inside = sum(s for at, s in nested if at - s >= event.time - d["seconds"] - 1e-4)
        waited = max(d["seconds"] - inside, 0.0)
        self.facts.wait += waited
        self._waits += d["seconds"]
        where = d["reason"], d["detail"], d["site"]
        sync = self._syncs.get(where)
        if sync is None:
            sync = self._syncs[where] = Sync(*where)
            self.facts.syncs.append(sync)
        sync.count += 1
        sync.waited += waited
        sync.longest = max(sync.longest, waited)
        sync.rounds += sync.seen != self.facts.flushes
        sync.seen = self.facts.flushes
        if d["reason"] == "sync.island":
            op = d["detail"].partition(": ")[0]
            for island in self._islands_at.get((op, d["site"]), ()):
                island.seconds += waited

    def _compiling(self, process: int, event: Event, d: dict[str, Any]) -> None:
        self.facts.compiling = d["region"] if d.get("waited", True) else ""

    def _compile(self, process: int, event: Event, d: dict[str, Any]) -> None:
        f = self.facts
        f.compiling = ""
        waited = d.get("waited", True)
        f.compile += d["seconds"] if waited else 0.0
        begin, end = self._spans[process]
        self._spans[process] = (min(begin, event.time - d["seconds"]), end)
        found = _form(process, event, d["region"], d["seconds"], d["skeleton"], waited)
        f.compiles.append(found)
        self._new.setdefault((process, event.thread), []).append(found)

    def _bypass(self, process: int, event: Event, d: dict[str, Any]) -> None:
        f = self.facts
        f.turns += d["turns"]
        if d.get("reason") in NOT_COMPILED:
            f.meanwhile += d["seconds"]
            f.waiting += d["turns"]
        else:
            f.bypassed += d["seconds"]
        # The next flush counts its host time from the one before.
        self._bypassed_s[process, event.thread] = self._bypassed_s.get((process, event.thread), 0.0) + d["seconds"]
        begin, end = self._spans[process]
        self._spans[process] = (min(begin, event.time - d["seconds"]), end)

    def _rest(self, process: int, event: Event, d: dict[str, Any]) -> None:
        self.facts.rests += 1

    def _came(self, process: int, event: Event, d: dict[str, Any]) -> None:
        words = f"{d['ops']} ops from {d['site']}"
        # Its seconds are added flush by flush; skeletons are numbered apart from those of compilations.
        form = _form(process, event, words, 0.0, -d["skeleton"], waited=False)
        self.facts.came.append(form)
        self._forms[process, d["plan"]] = form

    def _plan(self, process: int, event: Event, d: dict[str, Any]) -> None:
        plan = process, d["plan"]
        form = self._forms.get((process, d.get("instead_of") or 0))
        if form is not None:
            self._forms[plan] = form
        rows = []
        for index, r in enumerate(d["regions"]):
            lines = [(line, module, backward, ops) for line, module, backward, ops in r["lines"]]
            rows.append(
                Region(plan, index, r["how"], r["ops"], r["ended_by"], r["detail"], r["site"], lines, r)
            )
            for line, module, backward, ops in lines:
                row = self.facts.lines.setdefault(line, Line(line))
                row.ops.update(ops)
                row.backward += sum(ops.values()) if backward else 0
                row.regions.append((*plan, index))
                if module:
                    row.modules.add(module)
        self._plans[plan] = rows
        self.facts.regions += rows
        new = self._new.pop((process, event.thread), [])
        for r in d["regions"]:
            found = next((c for c in new if c.region == r.get("name") and c.code is None), None)
            if found is not None and (process, r["code"]) not in self._by_code:
                found.code = process, r["code"]
                self._by_code[found.code] = found

    def _run(self, process: int, event: Event, d: dict[str, Any]) -> None:
        rows = self._plans.get((process, d["plan"]), [])
        if d["region"] < len(rows):
            rows[d["region"]].samples.append(d["seconds"])

    def _recording(self, process: int, event: Event, d: dict[str, Any]) -> None:
        ops, seconds = self.facts.recording
        self.facts.recording = ops + d["ops"], seconds + d["seconds"]

    def _island(self, process: int, event: Event, d: dict[str, Any]) -> None:
        where = d["op"], d["reason"], d["site"]
        island = self._islands.get(where)
        if island is None:
            island = self._islands[where] = Island(*where)
            self.facts.islands.append(island)
            self._islands_at.setdefault((d["op"], d["site"]), []).append(island)
        island.count += d.get("times", 1)

    def _collective(self, process: int, event: Event, d: dict[str, Any]) -> None:
        group = d.get("group", "")
        new = Collective(d["op"], d["site"], group, d["ranks"])
        row = self.facts.collectives.setdefault((d["op"], d["site"], group), new)
        row.count += 1
        row.bytes += d["bytes"]
        row.seconds += d["seconds"]
        row.fetch_s += d.get("fetch_s", 0.0)
        if d.get("wait_s") is not None:
            row.wait_s += d["wait_s"]
            row.watched_s += d["seconds"]
        if len(row.sizes) < SIZES:
            row.sizes.add(d["bytes"])
        number = d.get("sequence")
        if number is None or d["ranks"] < 2:
            return
        met = self.facts.met.get((group, number))
        if met is None and len(self.facts.met) < MET:
            met = self.facts.met[group, number] = Met(d["site"], d["ranks"])
        if met is not None:
            waited = d.get("wait_s")
            met.waits[process] = d["seconds"] if waited is None else min(waited, d["seconds"])

    def _compile_failed(self, process: int, event: Event, d: dict[str, Any]) -> None:
        self.facts.compiling = ""
        self.facts.failures.append(d)

    def _lengths(self, process: int, event: Event, d: dict[str, Any]) -> None:
        self.facts.lengths[d["site"]] = d["why"]

    def _cache_off(self, process: int, event: Event, d: dict[str, Any]) -> None:
        self.facts.unusable.append({"folder": "", **d})

    def _choice(self, process: int, event: Event, d: dict[str, Any]) -> None:
        self.facts.choices[d["site"]] = d

    def _op_choice(self, process: int, event: Event, d: dict[str, Any]) -> None:
        if d["native"]:
            self.facts.op_choices.append(d)

    def _parameter(self, process: int, event: Event, d: dict[str, Any]) -> None:
        row = self._built.get(d["site"])
        key = d["module"], d["name"]
        if row is None:
            row = self._built[d["site"]] = Built(d["site"], d["module"], key=key)
            self.facts.built.append(row)
        if key == row.key:
            row.count += 1
            row.late += self.facts.flushes > 0
        elif row.late:
            row.seconds += event.time - row.last
        row.last = event.time

    def _memory(self, process: int, event: Event, d: dict[str, Any]) -> None:
        self.facts.peak = max(self.facts.peak, d["peak"])

    def forget(self, process: int, sums: Mapping[str, Mapping[str, float]]) -> None:
        """Take in the sums of events that are no longer there (`EventLog.forgotten`), after those that are. What only
        single events tell (which flushes a wait had in it, why torch was alone) is shared out as among these."""
        f = self.facts
        if sums:
            begin, end = self._spans.get(process, (0.0, 0.0))
            self._spans[process] = (min(begin, 0.0), end)
        bypass, sync, flush = (sums.get(kind, {}) for kind in ("bypass", "sync", "flush"))
        alone = bypass.get("seconds", 0.0)
        waiting = f.waiting / f.turns if f.turns else 0.0
        f.turns += int(bypass.get("turns", 0))
        f.waiting += round(waiting * bypass.get("turns", 0))
        f.meanwhile += waiting * alone + flush.get("native", 0.0)
        f.bypassed += (1 - waiting) * alone
        f.wait += sync.get("seconds", 0.0) * (f.wait / self._waits if self._waits else 0.0)
        count = int(flush.get("count", 0))
        f.forgotten, f.flushes, f.ops = f.forgotten + count, f.flushes + count, f.ops + int(flush.get("ops", 0))
        f.host += max(flush.get("host", 0.0) - alone, 0.0)
        f.launch += flush.get("seconds", 0.0) - flush.get("compiling", 0.0) - flush.get("native", 0.0)

    def finish(self) -> Facts:
        """The facts so far. More events may be added afterwards."""
        f = self.facts
        f.seconds = max((end - begin for begin, end in self._spans.values()), default=0.0)
        told = f.flushes - f.forgotten
        f.steps = (round(self._steps() * f.flushes / told) if f.forgotten and told else self._steps()) + f.turns
        for line in f.lines.values():
            line.device = 0.0
        for region in f.regions:
            each = (region.total or 0.0) / max(region.ops, 1)
            for site, _, _, ops in region.lines:
                f.lines[site].device += each * sum(ops.values())
        return f

    def _steps(self) -> int:
        """How often the program went round: optimizer steps, else backward passes, else the most frequent cut."""
        for wanted in ("cut.optimizer", "cut.backward"):
            counts = [n for (reason, _), n in self._reasons.items() if reason == wanted]
            if counts:
                return max(counts)
        return max((n for (reason, _), n in self._reasons.items() if reason != "mode.single"), default=0)


def _form(process: int, event: Event, region: str, seconds: float, skeleton: int, waited: bool) -> Compile:
    """A row for one form of some ops, from an event that tells how it differs from the nearest one."""
    d = event.data
    return Compile(
        region,
        d["site"],
        d["module"],
        d["ops"],
        seconds,
        d["cause"],
        d["why"],
        d["changes"],
        (process, skeleton),
        d["variant"],
        event.time,
        process,
        waited=waited,
    )


def add_up(processes: Sequence[Process]) -> Facts:
    """The facts of some processes, together."""
    adder = Adder()
    for number, process in enumerate(processes):
        for event in process.events:
            adder.add(number, event)
        adder.forget(number, process.forgotten)
        adder.facts.broken += process.broken
    adder.facts.processes = list(processes)
    return adder.finish()


def top(rows: Iterable[Any], by: str, n: int) -> list[Any]:
    """The `n` rows with the largest attribute `by`."""
    return sorted(rows, key=lambda r: -(getattr(r, by) or 0))[:n]
