"""Budgets: `with expect(max_compiles=0):` holds a part of a program to what it may compile, wait and leave to ATen."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ..compiling import background
from ..errors import BudgetExceeded
from ..frontends.context.context import fused_eager
from ..frontends.context.threads import current_door
from ..log.events import LOG, Event
from ..log.reasons import NOT_COMPILED
from .explaining import _with_plans
from .report import Report
from .source import short, shorten
from .text import count, duration

_NO_SYNC = frozenset({"cut.exit", "cut.options"})


class expect:
    """Raise `BudgetExceeded` at the end of the body if it compiled, waited or ran natively more than allowed.

    >>> with expect(max_compiles=0, max_syncs=1):
    ...     train_step()

    Args:
        max_compiles: regions that may be compiled.
        max_syncs: times that the program may wait for a value (an `.item()`, a print, a `.numpy()`); the end of a
            context does not count.
        max_islands: calls that may run natively.

    None allows any number. What is still pending at the end of the body has not been compiled yet, and does not count:
    end the body where the work is cut anyway, after `optimizer.step()` or `fused_eager.sync()`. All threads count.
    An exception of the body passes through, whatever the budget says.

    In the body everything is recorded, as with `native="never"`: what torch runs alone, because that is faster or while
    something is being compiled, nobody could count. So it goes for the context around it and for those within, but not
    for those that other threads have opened before.
    """

    def __init__(
        self, max_compiles: int | None = None, max_syncs: int | None = None, max_islands: int | None = None
    ):
        self.limits = {"compile": max_compiles, "sync": max_syncs, "island": max_islands}
        for name, limit in self.limits.items():
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise ValueError(f"max_{name}s cannot be {limit!r}; allowed: None, or a whole number from 0 on")
        self.seen: list[Event] = []
        self.start = 0.0
        self._recorded = contextlib.ExitStack()

    def __enter__(self) -> expect:
        background.wait()  # what was asked for before is not the body's
        self.seen.clear()
        LOG.budgets += 1
        door = current_door()
        if door is not None:
            door.stream.policy.backoff.end()
            self._recorded.enter_context(fused_eager())
        self.start = time.perf_counter()
        LOG.sinks.append(self.seen.append)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                background.wait()
        finally:
            LOG.sinks.remove(self.seen.append)
            LOG.budgets -= 1
            self._recorded.__exit__(kind, error, trace)
        if error is not None:
            return
        broken = [(name, self._found(name)) for name, limit in self.limits.items() if limit is not None]
        broken = [(name, found) for name, found in broken if len(found) > (self.limits[name] or 0)]
        if not broken:
            return
        exceeded = BudgetExceeded(self._text(broken))
        exceeded.report = self.report()
        raise exceeded

    def report(self) -> Report:
        """The report of the body."""
        return Report.of([_with_plans(self.seen, self.start)])

    def _found(self, name: str) -> list[Event]:
        found = [e for e in self.seen if e.kind == name and e.data.get("reason") not in _NO_SYNC]
        return [*found, *self._known_islands(found)] if name == "island" else found

    def _known_islands(self, told: list[Event]) -> Iterator[Event]:
        """Calls of the body that ran natively because that had turned out to be necessary before it."""
        plans = {e.data["plan"]: e.data["regions"] for e in [*LOG.of("plan"), *self.seen] if e.kind == "plan"}
        known = {(e.data["op"], e.data["site"]) for e in told}
        for flush in [e for e in self.seen if e.kind == "flush"]:
            for region in plans.get(flush.data["plan"], ()):
                if region["how"] == "aten" and region["ended_by"] not in NOT_COMPILED:
                    for line, _, _, ops in region["lines"]:
                        for op in collections.Counter(ops).elements():
                            if (op, line) not in known:
                                said = {"op": op, "site": line, "reason": "no lowering, as found before"}
                                yield Event("island", flush.time, said, flush.thread)

    def _text(self, broken: list[tuple[str, list[Event]]]) -> str:
        lines = []
        for name, found in broken:
            words, noun = _COUNTED[name]
            lines.append(f"{words.format(count(len(found), noun))}; allowed: {self.limits[name]} (max_{name}s)")
            lines += [f"  {_TOLD[name](e.data)}" for e in found[:20]]
            if len(found) > 20:
                lines.append(f"  and {len(found) - 20} more")
        found_advice = self.report().advice
        if found_advice:
            lines.append("what to change:")
            lines += [f"  {short(a.site)}: {a.title}; {a.cure}" for a in found_advice[:5]]
        return "\n".join(lines)


def _compiled(d: dict[str, Any]) -> str:
    sites = [d["site"]]
    return f"{shorten(d['region'], sites)} in {duration(d['seconds'])}: {shorten(d['why'], sites)} [{short(d['site'])}]"


def _waited(d: dict[str, Any]) -> str:
    return f"{short(d['site'])}: {d['reason']} {d['detail']}, {duration(d['seconds'])}"


def _native(d: dict[str, Any]) -> str:
    return f"{short(d['site'])}: {d['op']}: {d['reason']}"


_COUNTED = {
    "compile": ("{} compiled", "region"),
    "sync": ("the program waited {}", "time"),
    "island": ("{} ran natively", "op"),
}
_TOLD = {"compile": _compiled, "sync": _waited, "island": _native}
