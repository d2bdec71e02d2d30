"""What a program's first steps take: `python -m benchmarks.first_steps [WORKLOAD...]`.

Each is run in fresh processes with nothing compiled anywhere, eager and fused in turn, and not pinned: the compiler
may have a core of its own, as where users are. Setting up (imports, model, data) is in none of the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence

import torch

from benchmarks.environment import build_follower, wanted
from benchmarks.probe import empty_caches, fresh, seconds_of
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS, Size, select

DEFAULT = ("tiny", "elementwise_1m", "mlp_adam_loop", "gpt_adamw", "resnet18_train_64", "layers_2", "layers_12")
STEPS, ROUNDS, LIMIT_S = 40, 3, 600.0
HEAD = """| workload | first step: eager, ms | fused | slowest later step, fused, ms | {steps} steps: eager, s | fused |
|---|---|---|---|---|---|"""


def run(workload: str, system_name: str, steps: int, size: Size = "full") -> list[float]:
    """The seconds of each step in this process, which must be fresh."""
    system = SYSTEMS[system_name]
    with system.enter():  # load it
        system.wrap(lambda x: x + 1)(torch.ones(4))
        system.sync()
    with system.place():
        step = WORKLOADS[workload].build(system.wrap, size)
    with system.enter():
        return [seconds_of(step, system) for _ in range(steps)]


def row(workload: str, steps: int, rounds: int, size: Size = "full") -> str:
    """A line of the table: medians over `rounds` processes of each system; ratios against eager's of the same round."""
    command = [sys.executable, "-m", "benchmarks.first_steps", "--here", f"--steps={steps}", f"--size={size}", workload]
    taken: list[tuple[list[float], list[float]]] = []
    for _ in range(rounds):
        pair = []
        for system in ("eager", "fused"):
            with empty_caches() as environment:
                environment.update(wanted(1, "default"))
                pair.append(fresh([*command, "--system", system], environment, LIMIT_S))
        taken.append((pair[0], pair[1]))

    def ratio(of: Sequence[tuple[float, float]]) -> str:
        return f"{statistics.median(fused / eager for eager, fused in of):.2f}"

    first = [(eager[0], fused[0]) for eager, fused in taken]
    whole = [(sum(eager), sum(fused)) for eager, fused in taken]
    slowest = statistics.median(max(fused[1:]) for _, fused in taken)
    return (
        f"| {workload} | {statistics.median(e for e, _ in first) * 1e3:.0f} | {ratio(first)} | {slowest * 1e3:.0f} "
        f"| {statistics.median(e for e, _ in whole):.2f} | {ratio(whole)} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"by default {', '.join(DEFAULT)}")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fresh processes of each system")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--here", action="store_true", help="print the seconds of this process's steps as JSON")
    parser.add_argument("--system", choices=("eager", "fused"), default="fused", help="with --here")
    args = parser.parse_args(argv)
    try:
        workloads = [row.name for row in select(args.workloads or DEFAULT)]
    except ValueError as error:
        parser.error(str(error))
    if args.here:
        print(json.dumps(run(workloads[0], args.system, args.steps, args.size)), flush=True)
        os._exit(0)  # what is still being compiled is of no use to anybody
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: at least 2, for there are columns of the first and of later ones")
    build_follower()
    print(HEAD.format(steps=args.steps), flush=True)
    for workload in workloads:
        print(row(workload, args.steps, args.rounds, args.size), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
