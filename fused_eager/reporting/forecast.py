"""A forecast: what XLA's compiler for a target says of a program's step, in each mode, and by line and module.

Every figure is the compiler's own, for one device: nothing has run. A region's time is shared among its ops as their
times alone are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fused_eager.cache import Key

from ..compiling.cross import Cost
from ..compiling.met import Met, Op
from ..targets.target import Target

LIMITS: Mapping[str, str] = {
    "strict": "one op at a time, as in mode off",
    "fused": "fused regions, as a program gets them",
    "whole": "the step cut nowhere but at islands and reads: the limit",
}


# How often a float32 product passes through the matrix unit, whose operands are bfloat16, at each of torch's levels.
PASSES: Mapping[str, int] = {"highest": 6, "high": 3, "medium": 1}
PRODUCTS = (
    "addmm", "mm", "bmm", "baddbmm", "addmv", "mv", "convolution", "convolution_backward", "linear", "matmul",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """One step in one mode. Seconds, floating-point operations, bytes moved and cycles are sums over its regions, as
    often as they ran, without `unjudged` instructions and `uncounted_kernels`; `memory` is the largest sum of what a
    region takes and what is there beside it."""

    name: str
    seconds: float
    unjudged: int
    launches: int
    flops: float
    bytes: float
    memory: int
    failed: int = 0
    cycles: float = 0.0
    uncounted_kernels: int = 0

    def share(self, target: Target) -> float:
        """The part of the chip's peak that the operations would be (MFU)."""
        return self.flops / self.seconds / target.chip.flops if self.seconds else 0.0


@dataclass(frozen=True)
class Alone:
    """One op as a region of its own: where it is from, its form as in the key, its cost, how often a step runs it."""

    op: Op
    form: Mapping[str, Any]
    key: Key
    cost: Cost
    runs: int

    @property
    def seconds(self) -> float:
        """In a step."""
        return self.runs * self.cost.seconds

    @property
    def base(self) -> str:
        """The op without its namespace, its overload, and the mark of writing in place."""
        return self.op.name.replace("::", ".").split(".")[1].rstrip("_")

    @property
    def reads(self) -> list[tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of each tensor that it reads."""
        return [(read["dtype"], tuple(read["size"])) for read in self.form["reads"]]

    def uncounted(self, target: Target) -> float:
        """Seconds in a step that a float32 product takes beyond the compiler's figure, which counts one pass through
        the matrix unit whatever the precision. A product that waits for memory has time for some of the others."""
        is_product = self.base in PRODUCTS or "scaled_dot_product" in self.op.name
        if not is_product or any(dtype != "float32" for dtype, _ in self.reads[:2]):
            return 0.0
        passes = PASSES[self.key.parts["numerics"]["float32_matmul_precision"]]
        return self.runs * max(passes * self.cost.flops / target.chip.flops - self.cost.seconds, 0.0)


@dataclass
class Forecast:
    """All that is told. `lines` and `modules` have seconds of a step in mode fused; `islands` how often an op ran,
    and `places` on which line."""

    target: Target
    modes: list[Mode]
    lines: Mapping[str, float] = field(default_factory=dict)
    modules: Mapping[str, float] = field(default_factory=dict)
    islands: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    alone: list[Alone] = field(default_factory=list)
    late: list[Met] = field(default_factory=list)  # regions that came after the second step, alike to one before

    def mode(self, name: str) -> Mode:
        """One of the modes."""
        return next(mode for mode in self.modes if mode.name == name)

    @property
    def uncounted(self) -> float:
        """Seconds of a step that float32 products take beyond the figures, in every mode."""
        return sum(row.uncounted(self.target) for row in self.alone)


def steady(found: Sequence[Met], steps: int) -> dict[str, tuple[Met, int]]:
    """The regions of the last whole step and how often each ran in it; without steps, those of the whole run."""
    last = max(steps - 1, 0)
    runs = [(met, met.runs[last] if steps else met.runs.total()) for met in found]
    return {met.key.digest if met.key else met.name: (met, n) for met, n in runs if n}


def of_mode(name: str, found: Sequence[Met], steps: int, costs: Mapping[Key, Cost]) -> Mode:
    """A mode's figures."""
    rows = list(steady(found, steps).values())
    judged = [(met, n, costs[met.key]) for met, n in rows if met.key is not None and met.key in costs]
    return Mode(
        name,
        sum(n * cost.seconds for _, n, cost in judged),
        sum(n * cost.unjudged for _, n, cost in judged),
        sum(n for _, n in rows),
        sum(n * cost.flops for _, n, cost in judged),
        sum(n * cost.bytes for _, n, cost in judged),
        max((met.beside + cost.memory for met, _, cost in judged), default=0),
        sum(met.key not in costs for met, _ in rows),
        sum(n * cost.cycles for _, n, cost in judged),
        sum(n * cost.uncounted_kernels for _, n, cost in judged),
    )


def ops_alone(found: Sequence[Met], steps: int, costs: Mapping[Key, Cost]) -> list[Alone]:
    """The ops of a step in mode strict, each with its cost."""
    rows = []
    for met, n in steady(found, steps).values():
        if met.key is not None and met.key in costs and len(met.ops) == 1:
            rows.append(Alone(met.ops[0], met.key.parts["region"]["nodes"][0], met.key, costs[met.key], n))
    return rows


def shared_out(
    found: Sequence[Met], steps: int, costs: Mapping[Key, Cost], alone: Sequence[Alone], by: Callable[[Op], str]
) -> dict[str, float]:
    """The seconds of a step by what `by` says of an op, most first."""
    weights: dict[str, list[float]] = defaultdict(list)
    for row in alone:
        weights[row.op.name].append(row.cost.seconds)
    mean = {name: sum(w) / len(w) for name, w in weights.items()}
    at_line = {(row.op.name, row.op.line): row.cost.seconds for row in alone}
    total: dict[str, float] = defaultdict(float)
    for met, n in steady(found, steps).values():
        if met.key is None or met.key not in costs:
            continue
        each = [at_line.get((op.name, op.line), mean.get(op.name, 0.0)) or 1e-9 for op in met.ops]
        for op, weight in zip(met.ops, each, strict=True):
            total[by(op)] += n * costs[met.key].seconds * weight / sum(each)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def come_late(found: Sequence[Met], steps: int) -> list[Met]:
    """Regions that ran first after the second step, with the ops of one before: shapes or numbers have changed."""
    known = {tuple(op.name for op in met.ops) for met in found if met.runs and min(met.runs) < 2}
    late = [met for met in found if steps > 2 and met.runs and min(met.runs) >= 2]
    return [met for met in late if tuple(op.name for op in met.ops) in known]
