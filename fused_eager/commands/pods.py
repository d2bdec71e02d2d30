"""`forecast --mesh`: one step of a program on all chips of a pod, as XLA's compiler expects it.

The program is written for one device. Its step is compiled as it would be, cut nowhere, with its arguments divided
among the chips by the sizes of their dimensions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..compiling.cross import Refusal
from ..compiling.crossing import Bar, crossed
from ..compiling.met import Met
from ..compiling.pods import Collective, OnPod, by_kind, on_pod
from ..reporting.forecast import steady
from ..targets.links import LINKS, Link
from ..targets.mesh import GROWS, Mesh
from ..targets.target import Target, TargetError
from ..targets.topology import NoCompiler
from ..xla import use_the_cpu_alone
from .warming import CannotRun, give_up, meet, target_of

BAR = 40


@dataclass(frozen=True)
class Row:
    """A step on a mesh: what a chip computes and sends, in seconds, and its memory; `failed` are regions left out."""

    mesh: Mesh
    computing: float
    sending: float
    memory: int
    collectives: list[Collective]
    divided: int
    failed: dict[str, str]

    @property
    def step(self) -> float:
        """Where nothing that is sent overlaps with computing: the most that it takes."""
        return self.computing + self.sending


def row(found: Sequence[tuple[Met, int]], target: Target, mesh: Mesh, link: Link, jobs: int) -> Row:
    """The step's regions on the chips of a mesh."""
    bar = Bar(len(found), f"compiling for {mesh.chips} chips of {target}")
    outcomes: dict[Any, OnPod] = {}
    failed = {met.name: f"it has no key: {met.why}" for met, _ in found if met.key is None}
    names = {met.key: met.name for met, _ in found if met.key is not None}
    for key, outcome in crossed(list(names), target, jobs, partial(on_pod, mesh=mesh)):  # type: ignore[arg-type]
        bar.step(isinstance(outcome, Refusal))
        if isinstance(outcome, Refusal):
            failed[names[key]] = outcome.reason
        else:
            outcomes[key] = outcome  # type: ignore[assignment]
    done = [(outcomes[met.key], n) for met, n in found if met.key in outcomes]
    sent = [c for outcome, n in done for c in outcome.collectives * n]
    return Row(
        mesh,
        sum(n * outcome.cost.seconds for outcome, n in done),
        sum(c.seconds(link) for c in sent),
        max((outcome.cost.memory for outcome, _ in done), default=0),
        sent,
        sum(outcome.divided for outcome, _ in done),
        failed,
    )


def rows(given: argparse.Namespace, target: Target, mesh: Mesh, link: Link) -> Iterator[Row]:
    """The step on ever more chips. Where an argument grows with an axis, the program is run for each number of them.

    Raises:
        CannotRun, FileNotFoundError: as `meet`.
        TargetError: an argument grows with an axis that the mesh has not, or its size cannot be divided.
    """
    meshes = [Mesh.parse(str(some), given.split) for some in mesh.smaller()]
    arguments = [[some.grown(argument) for argument in given.arguments] for some in meshes]
    found: list[tuple[Met, int]] = []
    for some, theirs in zip(meshes, arguments, strict=True):
        if not found or theirs != arguments[0]:
            met, about = meet(argparse.Namespace(**{**vars(given), "arguments": theirs}), "whole")
            found = list(steady(met, about["steps"]).values())
        yield row(found, target, some, link, given.jobs)


def as_text(target: Target, found: Sequence[Row], link: Link, grows: bool = False) -> str:
    """The table, and how the step shrinks with the chips, or (`grows`) how far it stays the same."""
    first, last = found[0], found[-1]
    work = "each with its own work (weak scaling)" if grows else "its work divided among them (strong scaling)"
    lines = [
        f"One step on chips of {target}, {work}, as XLA's compiler expects it.",
        f"{last.divided} arguments are divided, all others are on each chip. Sending does not overlap with computing.",
        f"{link.name}: {link.source}.",
        "",
        f"{'chips':>6}  {'mesh':<20}{'step':>11}{'computing':>11}{'sending':>11}{'memory':>11}{'of chip':>8}"
        f"{'efficiency':>11}  collectives",
    ]
    for row in found:
        told = ", ".join(f"{n} {kind} {b / 2**20:.3g} MB" for kind, (n, b) in sorted(by_kind(row.collectives).items()))
        gain = first.step / row.step if row.step else 0.0
        gain *= 1 if grows else first.mesh.chips / row.mesh.chips
        lines.append(
            f"{row.mesh.chips:>6}  {row.mesh!s:<20}{_us(row.step):>11}{_us(row.computing):>11}{_us(row.sending):>11}"
            f"{row.memory / 2**20:>8.4g} MB{row.memory / target.chip.hbm:>8.0%}{gain:>11.0%}  {told}"
        )
    most = max(row.step for row in found) or 1.0
    lines += ["", "Step (# computing, + sending):"]
    for row in found:
        bar = "#" * round(BAR * row.computing / most) + "+" * round(BAR * row.sending / most)
        lines.append(f"{row.mesh.chips:>6} {bar:<{BAR}} {_us(row.step)}")
    lines += [f"  left out: {name}: {why}" for name, why in last.failed.items()]
    return "\n".join(lines)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.4g} us"


def run(given: argparse.Namespace, prog: str) -> int:
    """The command; returns the exit code."""
    use_the_cpu_alone()
    try:
        target, mesh = target_of(given.target), Mesh.parse(given.mesh, given.split)
        name = f"ici-{target.generation}" if given.link == "gloo" else given.link
        link = LINKS["ici-v5p"] if name not in LINKS and given.link == "gloo" else Link.parse(name)
        found = list(rows(given, target, mesh, link))
    except (TargetError, NoCompiler, ValueError, OSError, CannotRun) as error:
        return give_up(prog, error)
    if given.json:
        told = [
            {"mesh": dict(row.mesh.axes), "seconds": row.step, "computing": row.computing, "sending": row.sending,
             "memory": row.memory, "divided": row.divided, "collectives": by_kind(row.collectives),
             "failed": row.failed}
            for row in found
        ]  # fmt: skip
        print(json.dumps(told, indent=2))
    else:
        print(as_text(target, found, link, any(map(GROWS.search, given.arguments))))
    return 0
