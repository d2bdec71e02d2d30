"""A program's first minute: `python -m benchmarks.first_minute [PROGRAM...]`.

Two processes run the same program in turns, one plain, one in a context around its loop with nothing compiled anywhere.
Time is the wall clock's of each one's own turns. What is told is the work that was done, over plain's in the turns
beside it: in the first ten seconds, in all of the time, and in the last ten seconds; then for a
second process, which finds in the cache what the first has compiled. With `--cores 1` all of it has one core.

`--json FILE` keeps every turn, `--plot FILE` draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.environment import wanted
from benchmarks.probe import empty_caches
from benchmarks.programs import PROGRAMS
from benchmarks.systems import SYSTEMS, no_wait
from benchmarks.turns import Over, Turns, Working, ended
from benchmarks.workloads import WORKLOADS, Size, select

ENDS_S = 10.0  # how much of the time is its beginning, and its end
EVERY = {**WORKLOADS, **{row.name: row for row in PROGRAMS}}
DEFAULT = (
    "tiny", "elementwise_1m", "layernorm_gelu_residual", "mlp_adam_loop", "gpt_adamw", "resnet18_forward_64",
    "decode_32", "static_cache_decode", "sampling_loop", "beam_search_ops", "rnn_200_steps", "gan_train",
    "dqn_small_batches", "ragged_layernorm", "mnist_varying_batch", "prefetching_train", "gradient_accumulation",
    "two_metrics_eval", "nbody", "lbfgs", "grad_penalty_double_backward", "notebook_mix",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One turn of both: steps for each second, and the seconds of ours."""

    plain: float
    ours: float
    seconds: float


@dataclass(frozen=True)
class Minute:
    """What one process did, over plain's work in the turns beside it."""

    turns: tuple[Turn, ...]

    def work(self, begin: float = 0.0, end: float = float("inf")) -> float:
        """Over plain's, between two times of its own."""
        done = would = at = 0.0
        for turn in self.turns:
            if begin <= at < end:
                done, would = done + turn.ours * turn.seconds, would + turn.plain * turn.seconds
            at += turn.seconds
        return done / would if would else float("nan")

    @property
    def seconds(self) -> float:
        """How long it worked."""
        return sum(turn.seconds for turn in self.turns)

    def __str__(self) -> str:
        last = self.work(begin=max(0.0, self.seconds - ENDS_S))
        return f"{self.work(end=ENDS_S):.2f} | {self.work():.2f} | {last:.2f}"


def work(program: str, system: str, size: Size) -> None:
    """In a process of its own: steps in the turns that it is given."""
    with contextlib.suppress(Over), ExitStack() as stack:
        turns = Turns(no_wait)
        step = EVERY[program].build(lambda function: function, size)
        stack.enter_context(SYSTEMS[system].enter())
        while True:
            step()
            turns.step()


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """In the body, processes that are started may use so many cores alone; 0: all that there are."""
    before = os.sched_getaffinity(0)
    try:
        if count:
            os.sched_setaffinity(0, sorted(before)[-count:])
        yield
    finally:
        os.sched_setaffinity(0, before)


def minute(program: str, seconds: float, size: Size, environment: dict[str, str]) -> Minute:
    """One process in a context beside a plain one, for so many seconds of its work."""

    def process(system: str) -> Working:
        command = [sys.executable, "-m", "benchmarks.first_minute", "--here", system, "--size", size, program]
        return Working(command, environment)

    plain, ours = process("eager"), process("fused")
    turns: list[Turn] = []
    with ended(plain, ours):
        plain.turn()  # torch's own first steps are not what is compared
        while sum(turn.seconds for turn in turns) < seconds:
            before = plain.turn()[0]
            turns.append(Turn(before, *ours.turn()))
    return Minute(tuple(turns))


def row(program: str, seconds: float, cores: int, size: Size = "full") -> tuple[Minute, Minute]:
    """The first process, and a second one with what the first has compiled."""
    with empty_caches() as environment, on_cores(cores):
        environment.update(wanted(1, "default"))
        return minute(program, seconds, size, environment), minute(program, seconds, size, environment)


def draw(rows: dict[str, tuple[Minute, Minute]], file: Path) -> None:
    """A line for each program: work over plain's, turn by turn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(-(-len(rows) // 4), 4, figsize=(16, 2.2 * -(-len(rows) // 4)), squeeze=False)
    for pane in panes.flat[len(rows) :]:
        pane.set_visible(False)
    for pane, (name, found) in zip(panes.flat, rows.items(), strict=False):
        for each, label in zip(found, ("nothing compiled", "second process"), strict=True):
            ends = [sum(t.seconds for t in each.turns[: i + 1]) for i in range(len(each.turns))]
            pane.plot(ends, [t.ours / t.plain for t in each.turns], label=label)
        pane.axhline(1.0, color="grey", linewidth=0.5)
        pane.set_title(name, fontsize=9)
        pane.set_ylim(bottom=0.0)
    panes.flat[0].legend(fontsize=7)
    figure.supxlabel("seconds of its own work")
    figure.supylabel("speed over plain PyTorch's")
    figure.tight_layout()
    figure.savefig(file)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_minute", description=__doc__)
    parser.add_argument("program", nargs="*", help="names, or their beginnings")
    parser.add_argument("--seconds", type=float, default=60.0, help="of work of each process")
    parser.add_argument("--cores", type=int, default=0, help="for all processes together (default: all)")
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--here", choices=("eager", "fused"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.here:
        torch.set_num_threads(1)
        work(arguments.program[0], arguments.here, arguments.size)
        return 0
    names = ("first 10 s", "all", "last 10 s")
    print(f"| program | {' | '.join(names)} | second process: {' | '.join(names)} |\n|---|{'---|' * 6}")
    rows: dict[str, tuple[Minute, Minute]] = {}
    for chosen in select(arguments.program or DEFAULT, tuple(EVERY.values())):
        rows[chosen.name] = found = row(chosen.name, arguments.seconds, arguments.cores, arguments.size)
        print(f"| {chosen.name} | {found[0]} | {found[1]} |", flush=True)
    for place, which in enumerate(("nothing compiled", "second process")):
        least = min((found[place].work(), name) for name, found in rows.items())
        middle = statistics.median(found[place].work() for found in rows.values())
        print(f"{which}: least {least[0]:.2f} ({least[1]}), median {middle:.2f}")
    if arguments.json:
        kept = {name: [[asdict(turn) for turn in each.turns] for each in found] for name, found in rows.items()}
        arguments.json.write_text(json.dumps({"cores": arguments.cores, "programs": kept}))
    if arguments.plot:
        draw(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
