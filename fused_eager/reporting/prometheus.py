"""The facts as metrics in Prometheus's text format, for long-running jobs: counters since the start of the log."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from .facts import Facts

Sample = tuple[Mapping[str, str], float]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(name: str, kind: str, help: str, samples: Iterable[Sample]) -> list[str]:
    lines = [f"# HELP fused_eager_{name} {help}", f"# TYPE fused_eager_{name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"fused_eager_{name}{{{inside}}} {value:.9g}" if inside else f"fused_eager_{name} {value:.9g}")
    return lines


def metrics(f: Facts) -> str:
    """All metrics, as the body of a scrape. Seconds and bytes, as Prometheus wants them."""
    flushes: collections.Counter[str] = collections.Counter()
    for cut in f.cuts:
        flushes[cut.reason] += cut.count
    waits = [({"reason": s.reason, "line": s.site, "what": s.detail}, s) for s in f.syncs]
    causes: dict[str, list[float]] = {}
    for c in f.compiles:
        causes.setdefault(c.cause, []).append(c.seconds)
    compiled = [({"cause": cause}, seconds) for cause, seconds in causes.items()]
    host = {"program": f.host, "launch": f.launch, "wait": f.wait, "compile": f.compile}
    host |= {"alone": f.bypassed, "meanwhile": f.meanwhile}
    rows = [
        _metric("ops_total", "counter", "Ops that were flushed.", [({}, f.ops)]),
        _metric("rounds_total", "counter", "Rounds of the training loop.", [({}, f.steps)]),
        _metric("region_runs_total", "counter", "Runs of regions.", [({}, f.runs)]),
        _metric("flushes_total", "counter", "Flushes by reason.", [({"reason": r}, n) for r, n in flushes.items()]),
        _metric("waits_total", "counter", "Waits by reason and line.", [(w, s.count) for w, s in waits]),
        _metric("wait_seconds_total", "counter", "Seconds waited.", [(w, s.waited) for w, s in waits]),
        _metric("compiles_total", "counter", "Compilations by cause.", [(c, len(s)) for c, s in compiled]),
        _metric("compile_seconds_total", "counter", "Seconds compiling.", [(c, sum(s)) for c, s in compiled]),
        _metric("cache_loads_total", "counter", "Regions from the compile cache.", [({}, len(f.loads))]),
        _metric(
            "islands_total",
            "counter",
            "Calls told to run natively.",
            [({"op": i.op, "line": i.site, "reason": i.reason}, i.count) for i in f.islands],
        ),
        _metric("host_seconds_total", "counter", "The host's time.", [({"in": k}, v) for k, v in host.items()]),
        _metric("seconds", "gauge", "Seconds from the first to the last event.", [({}, f.seconds)]),
        _metric("memory_peak_bytes", "gauge", "The most memory that was resident.", [({}, f.peak)]),
        _metric("compiling", "gauge", "Whether a compilation is under way.", [({}, 1 if f.compiling else 0)]),
    ]
    return "\n".join(line for row in rows for line in row) + "\n"
