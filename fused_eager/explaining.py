"""Explaining: run a function once, and say what became of each of its lines."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .context import fused_eager
from .events import LOG


@dataclass(frozen=True)
class Explanation:
    """What one call did: its result, the regions in the order in which they ran, and what was compiled.

    `islands` are (op, reason, line) of ops that ran natively; `syncs` counts the reasons for which work was cut.
    """

    result: Any
    regions: tuple[dict[str, Any], ...]
    compilations: tuple[str, ...]
    compile_seconds: float
    islands: tuple[tuple[str, str, str], ...]
    syncs: dict[str, int]

    def __str__(self) -> str:
        lines = [
            f"{sum(r['ops'] for r in self.regions)} ops in {len(self.regions)} regions; {len(self.compilations)} "
            f"compiled in {self.compile_seconds:.1f} s"
        ]
        for number, region in enumerate(self.regions):
            lines.append(f"region {number} [{region['how']}], {region['ops']} ops, ended by {region['ended_by']}")
            for line, _, _, ops in region["lines"]:
                shown = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in ops.items())
                lines.append(f"    {line}: {shown}")
        lines += [f"island {op} at {place}: {reason}" for op, reason, place in self.islands]
        return "\n".join(lines)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call `function(*args, **kwargs)` once under `fused_eager(mode="fused")` and explain what happened to its ops.

    Everything is finished on return. Exceptions of the function pass through.
    """
    seen: list[Any] = []
    LOG.sinks.append(seen.append)
    try:
        with fused_eager(mode="fused"):
            result = function(*args, **kwargs)
    finally:
        LOG.sinks.remove(seen.append)
    flushes = [e for e in seen if e.kind == "flush"]
    plans = {e.data["plan"]: e.data["regions"] for e in LOG.of("plan")}
    compiles = [e for e in seen if e.kind == "compile"]
    return Explanation(
        result,
        tuple(region for e in flushes for region in plans.get(e.data["plan"], ())),
        tuple(e.data["region"] for e in compiles),
        sum(e.data["seconds"] for e in compiles),
        tuple((e.data["op"], e.data["reason"], e.data["site"]) for e in seen if e.kind == "island"),
        dict(collections.Counter(e.data["reason"] for e in flushes)),
    )
