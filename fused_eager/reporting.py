"""The report: a view of the event log that says what was fused, what was compiled, and what got in the way."""

from __future__ import annotations

from dataclasses import dataclass

from .events import LOG
from .reasons import CODES


@dataclass(frozen=True)
class Report:
    """What happened since the process started, or since `clear()`.

    `compilations` is their number, `compile_seconds` their time; `flushes` and `syncs` count by reason code, `islands`
    by op with the reason.
    """

    ops: int
    regions: int
    compilations: int
    compile_seconds: float
    flushes: dict[str, int]
    islands: dict[str, str]
    regions_compiled: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.ops} ops ran in {self.regions} regions; {self.compilations} regions were compiled in "
            f"{self.compile_seconds:.1f} s"
        ]
        for code, count in sorted(self.flushes.items(), key=lambda item: -item[1]):
            lines.append(f"  {count:6} x {code}: {CODES[code].meaning}; hint: {CODES[code].hint}")
        for op, reason in self.islands.items():
            lines.append(f"  island {op}: {reason}")
        return "\n".join(lines)


def report() -> Report:
    """The report of this process so far."""
    prefix = "flush for "
    flushes = {kind.removeprefix(prefix): n for kind, n in LOG.counts.items() if kind.startswith(prefix)}
    compiles = LOG.of("compile")
    islands = {e.data["op"]: f"{e.data['reason']} ({e.data['site']})" for e in LOG.of("island")}
    return Report(
        int(LOG.totals["flush ops"]),
        int(LOG.totals["flush regions"]),
        LOG.counts["compile"],
        LOG.totals["compile seconds"],
        flushes,
        islands,
        tuple(e.data["region"] for e in compiles),
    )
