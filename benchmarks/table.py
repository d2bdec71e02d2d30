"""The results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.measure import Timing
from benchmarks.probe import Probe, Sample

LEGEND = """\
eager: milliseconds per step, the median over rounds (and the interquartile range).
Other systems: time against eager in the same round, the median (and the interquartile range); below 1 is faster.
first step: seconds in a fresh process with empty compile caches, loading the system + the first step; then, after
  the slash, the first step of the next process, which finds the caches filled.
compiled: regions (for torch.compile graphs, for torchax what JAX compiles) that the fresh process compiled in its first
  step + in all later ones.
memory: peak resident set above the loaded system's, in MiB for eager and against eager for others: of a loop that has
  run for a while and, after the slash, of the first steps.
A * marks a system that still compiled while it was timed."""


@dataclass
class Row:
    """All that is known of one workload: per system's name a timing, and what fresh processes told or why not."""

    workload: str
    about: str
    trains: bool
    timings: dict[str, Timing] = field(default_factory=dict)
    probes: dict[str, Probe] = field(default_factory=dict)
    failed_probes: dict[str, str] = field(default_factory=dict)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _with_spread(value: float, spread: float) -> str:
    return f"{_number(value)} ({_number(spread)})"


def _time(name: str, timing: Timing | None) -> str:
    if timing is None:
        return "-"
    if timing.failure:
        return "wrong" if timing.failure.startswith("wrong") else "failed"
    if name == "eager":
        return _with_spread(1e3 * timing.seconds, 1e3 * timing.spread)
    return _with_spread(timing.ratio, timing.ratio_spread) + "*" * bool(
        timing.compiled_while_timed or not timing.settled
    )


def _first_step(row: Row, name: str) -> str:
    probe = row.probes.get(name)
    if probe is None:
        return "-"
    cold, warm = probe.cold, probe.warm
    return f"{_number(cold.load_s)} + {_number(cold.step_s[0])} / {_number(warm.step_s[0])}"


def _compiled(row: Row, name: str) -> str:
    probe = row.probes.get(name)
    if probe is None:
        return "-"
    first, last = probe.cold.compilations[0], probe.cold.compilations[-1]
    return "?" if first is None or last is None else f"{first} + {last - first}"


def _memory(row: Row, name: str) -> str:
    probe, plain = row.probes.get(name), row.probes.get("eager")
    if probe is None:
        return "-"
    ours, eager = _peaks(probe.warm), _peaks(plain.warm) if plain else (math.nan, math.nan)
    if name == "eager":
        return " / ".join(map(_number, ours))
    # A few MiB above the base are allocator noise, and a ratio of noise says nothing.
    return " / ".join(
        f"{above / reference:.2f}x" if reference > 10 else f"{above:+.0f} MiB"
        for above, reference in zip(ours, eager, strict=True)
    )


def _peaks(sample: Sample) -> tuple[float, float]:
    """Above the loaded system, in MiB: of a loop that has run for a while, and of the first steps."""
    steady = math.nan if sample.steady_peak_mb is None else sample.steady_peak_mb
    return steady - sample.base_mb, sample.first_peak_mb - sample.base_mb


def render(rows: Sequence[Row], systems: Sequence[str]) -> str:
    """The table, one line per workload; `systems` are the columns, plain eager first. Failures are named below it."""
    others = [name for name in systems if name != "eager"]
    probed = any(row.probes or row.failed_probes for row in rows)
    head = ["workload", "eager ms", *others]
    if probed:
        head += [f"first step {name}" for name in systems]
        head += [f"compiled {name}" for name in others]
        head += [f"memory {name}" for name in systems]
    body = []
    for row in rows:
        cells = [row.workload, *(_time(name, row.timings.get(name)) for name in ("eager", *others))]
        if probed:
            cells += [_first_step(row, name) for name in systems]
            cells += [_compiled(row, name) for name in others]
            cells += [_memory(row, name) for name in systems]
        body.append(cells)
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [head, ["-" * width for width in widths], *body]
    ]
    return "\n".join([*lines, *failures(rows)])


def failures(rows: Sequence[Row]) -> list[str]:
    """One line per system and workload without a figure, with the reason."""
    lines = []
    for row in rows:
        lines += [f"{row.workload}, {name}: {timing.failure}" for name, timing in row.timings.items() if timing.failure]
        lines += [f"{row.workload}, {name}, in a fresh process: {why}" for name, why in row.failed_probes.items()]
    return lines


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def summary(rows: Sequence[Row], systems: Sequence[str]) -> str:
    """The geometric means over rows: of every system against eager, and of Fused against Strict, training apart."""

    def means(name: str, against: str) -> str:
        parts = []
        for kind, trains in (("training", True), ("other", False)):
            pairs = [(row.timings.get(name), row.timings.get(against)) for row in rows if row.trains == trains]
            ratios = [a.seconds / b.seconds for a, b in pairs if a and b and not a.failure and not b.failure]
            if ratios:
                parts.append(f"{_number(geometric_mean(ratios))} over {len(ratios)} {kind} workloads")
        return f"{name} against {against}: time " + (", ".join(parts) or "not known")

    lines = [means(name, "eager") for name in systems if name != "eager"]
    if {"fused", "strict"} <= set(systems):
        lines.append(means("fused", "strict"))
    return "\n".join(lines)


def to_json(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Everything that was measured. Figures that do not exist are null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list):
            return [clean(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({"settings": dict(settings), "rows": [clean(asdict(row)) for row in rows]}, indent=1)
