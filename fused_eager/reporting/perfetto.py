"""The event log as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

Each process of the job is a process of the trace. A thread has its own tracks: what the program did and waited for,
compilations, and the regions that were timed. Times are microseconds since the first process's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..log.events import Event
from .reading import Process
from .source import short, shorten

_TRACKS = ("program", "compiling", "regions (sampled)")


def trace(processes: Sequence[Process]) -> dict[str, Any]:
    """The trace as a JSON object."""
    base = min((p.wall for p in processes if p.wall), default=0.0)
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes):
        offset = process.wall - base if process.wall else 0.0
        events.append(_meta("process_name", number, 0, f"{process.name} ({process.start.get('host', 'here')})"))
        threads = sorted({e.thread for e in process.events if e.kind != "collective"})  # else gloo's are among them
        for thread in threads:
            for track, name in enumerate(_TRACKS):
                label = name if len(threads) == 1 else f"thread {thread}: {name}"
                events.append(_meta("thread_name", number, thread * len(_TRACKS) + track, label))
        regions: dict[tuple[int, int], str] = {}
        for e in process.events:
            if e.kind == "plan":
                for index, r in enumerate(e.data["regions"]):
                    lines = [line for line, *_ in r["lines"]]
                    where = f"{short(lines[0])} to {short(lines[-1])}" if lines else "?"
                    regions[e.data["plan"], index] = f"{r['ops']} ops from {where}"
            events += _of(e, number, offset, regions)
    # What was under way when the log was opened began before it.
    early = min([row["ts"] for row in events], default=0)
    for row in events:
        if early < 0 and row["ph"] != "M":
            row["ts"] = round(row["ts"] - early, 3)
    events.sort(key=lambda row: row["ts"])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _of(e: Event, pid: int, offset: float, regions: dict[tuple[int, int], str]) -> list[dict[str, Any]]:
    d, tid = e.data, e.thread * len(_TRACKS)

    def slice_(name: str, begin: float, seconds: float, track: int = 0, **args: Any) -> dict[str, Any]:
        times = {"ts": round((offset + begin) * 1e6, 3), "dur": round(max(seconds, 0.0) * 1e6, 3)}
        return {"ph": "X", "name": name, "cat": e.kind, "pid": pid, "tid": tid + track, **times, "args": args}

    if e.kind == "flush":
        start = e.time - d["seconds"]
        told = {"reason": d["reason"], "line": d["site"], "ops": d["ops"], "regions": d["regions"], "plan": d["plan"]}
        return [
            slice_("program and recording", start - d["host"], d["host"]),
            slice_(f"flush: {d['reason']}", start, d["seconds"], **told),
            {"ph": "C", "name": "ops per flush", "pid": pid, "ts": round((offset + e.time) * 1e6, 3),
             "args": {"ops": d["ops"]}},
        ]  # fmt: skip
    if e.kind == "sync":
        name = f"wait: {d['detail'] or d['reason']} at {short(d['site'])}"
        return [slice_(name, e.time - d["seconds"], d["seconds"], reason=d["reason"], line=d["site"])]
    if e.kind == "compile":
        name = shorten(f"compile {d['region']}", [d["site"]])
        return [slice_(name, e.time - d["seconds"], d["seconds"], 1, why=d["why"], cause=d["cause"], line=d["site"])]
    if e.kind == "run":
        name = regions.get((d["plan"], d["region"]), f"plan {d['plan']}, region {d['region']}")
        return [slice_(name, e.time - d["seconds"], d["seconds"], 2, how=d["how"], plan=d["plan"])]
    if e.kind == "collective":  # several are under way at once
        began, name = offset + e.time - d["seconds"], f"{d['op'].strip('_')} at {short(d['site'])}"
        of = {"cat": e.kind, "pid": pid, "tid": tid, "name": name, "id": f"{d['group']}/{d.get('sequence')}/{began}"}
        told = {name: d.get(name) for name in ("group", "sequence", "bytes", "ranks", "fetch_s", "wait_s")}
        begins = {"ph": "b", **of, "ts": round(began * 1e6, 3), "args": {**told, "line": d["site"]}}
        return [begins, {"ph": "e", **of, "ts": round((offset + e.time) * 1e6, 3)}]
    if e.kind == "island":
        moment = {"ph": "i", "s": "t", "name": f"island: {d['op']}", "cat": "island", "pid": pid, "tid": tid}
        return [{**moment, "ts": round((offset + e.time) * 1e6, 3), "args": {"why": d["reason"], "line": d["site"]}}]
    return []
