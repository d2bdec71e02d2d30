"""Event logs made by hand, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from fused_eager.log.events import Event
from fused_eager.reporting.reading import Process
from fused_eager.reporting.report import Report


class Log:
    """Events of one process, a millisecond apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at = 0.0

    def tell(self, kind: str, thread: int = 0, **data: Any) -> None:
        self.at += 1e-3
        self.events.append(Event(kind, self.at, data, thread))

    def flush(self, reason: str = "cut.backward", site: str = "a.py:1", plan: int = 1, **more: Any) -> None:
        fields = {"detail": "", "ops": 3, "regions": 1, "host": 1e-4, "seconds": 2e-4, "compiling": 0.0, **more}
        self.tell("flush", reason=reason, site=site, plan=plan, **fields)

    def sync(self, reason: str = "sync.value", site: str = "a.py:2", seconds: float = 1e-3, **more: Any) -> None:
        fields = {"detail": "aten._local_scalar_dense.default", "compiling": 0.0, **more}
        self.tell("sync", reason=reason, site=site, seconds=seconds, **fields)

    def plan(self, number: int = 1, *lines: Any, **more: Any) -> None:
        rows = [list(line) for line in lines or [("a.py:1", "", False, {"aten.add.Tensor": 3})]]
        region = {
            "how": "xla",
            "ops": sum(sum(ops.values()) for *_, ops in rows),
            "ended_by": "cut.backward",
            "detail": "",
            "site": "",
            "lines": rows,
            "inputs": 1,
            "outputs": 1,
            "donated": 0,
            "read_bytes": 32,
            "written_bytes": 32,
            "donated_bytes": 0,
            "scratch_bytes": 0,
            "inner_bytes": 64,
            "code": number,
            "name": f"region {number}",
        }
        self.tell("plan", plan=number, regions=[{**region, **more}])

    def compile(self, number: int = 1, cause: str = "first", **more: Any) -> None:
        fields = {
            "ops": 3,
            "seconds": 0.5,
            "tracing": 0.1,
            "inputs": 1,
            "outputs": 1,
            "why": "these ops are compiled for the first time",
            "site": "a.py:1",
            "module": "",
            "changes": [],
            "skeleton": 1,
            "variant": 1 if cause == "first" else 2,
        }
        self.tell("compile", region=f"region {number}", cause=cause, **{**fields, **more})

    def island(self, op: str = "aten.sort.default", site: str = "a.py:3", reason: str = "no lowering") -> None:
        self.tell("island", op=op, reason=reason, site=site)

    @property
    def process(self) -> Process:
        return Process({"pid": 1, "v": 1}, self.events, "log", True)

    @property
    def report(self) -> Report:
        return Report.of([self.process])
