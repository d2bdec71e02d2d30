"""What it costs where a context is entered: `python -m benchmarks.entering [WORKLOAD...]`.

Around a loop, in each of its steps, or again every two seconds: each way has a process of its own with nothing compiled
anywhere, beside one that is plain. The two work in turns, so a busy machine slows both. What is told is speed over
plain's by the processor time of the thread that runs the loop: over all of the time, and over the last third of it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from benchmarks.environment import wanted
from benchmarks.probe import empty_caches
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS, Size, Step, select

DEFAULT = ("decode_32", "tiny", "gpt_adamw", "resnet18_forward_64", "mlp_adam_loop")
TURN_S = 0.5  # processor time that a process works in its turn
AGAIN_S = 2.0


class Contexts(ExitStack):
    """Those that stay open from turn to turn."""

    opened = False


def _around(step: Step, wanted_s: float, stack: Contexts) -> None:
    if not stack.opened:
        stack.enter_context(SYSTEMS["fused"].enter())
        stack.opened = True
    _plain(step, wanted_s, stack)


def _plain(step: Step, wanted_s: float, stack: Contexts) -> None:
    step()


def _each(step: Step, wanted_s: float, stack: Contexts) -> None:
    with SYSTEMS["fused"].enter():
        step()


def _again(step: Step, wanted_s: float, stack: Contexts) -> None:
    began = time.thread_time()
    with SYSTEMS["fused"].enter():
        step()
        while time.thread_time() - began < wanted_s:
            step()


@dataclass(frozen=True)
class Way:
    """One column: `go` does at least one step, with as many contexts as it takes."""

    about: str
    go: Callable[[Step, float, Contexts], None]
    turn_s: float = TURN_S


WAYS = {
    "plain": Way("plain PyTorch", _plain),
    "around": Way("one context around the loop", _around),
    "each": Way("a context in each step", _each),
    "again": Way("entered again every 2 s", _again, AGAIN_S),
}


def work(workload: str, way: str, size: Size) -> None:
    """In a process of its own: for each line that is read, work for a turn, and say what steps there were and what
    processor time they took."""
    done = 0
    step = WORKLOADS[workload].build(lambda function: function, size)

    def counted() -> object:
        nonlocal done
        done += 1
        return step()

    chosen = WAYS[way]
    if way != "plain":
        with SYSTEMS["fused"].enter():  # load it
            pass
    with Contexts() as stack:
        for _ in sys.stdin:
            began, before, took = time.thread_time(), done, 0.0
            while took < chosen.turn_s:
                chosen.go(counted, chosen.turn_s, stack)
                took = time.thread_time() - began
            print(done - before, took, flush=True)


def speeds(workload: str, way: str, seconds: float, size: Size = "full") -> list[float]:
    """Speed over plain's in each turn of a process that has nothing compiled, for so many seconds of its work."""
    found, spent = [], 0.0
    with ExitStack() as stack:
        working = []
        for each in ("plain", way):
            environment = stack.enter_context(empty_caches())
            environment.update(wanted(1, "default"))
            command = [sys.executable, "-m", "benchmarks.entering", "--here", each, "--size", size, workload]
            working.append(
                stack.enter_context(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
                    )
                )
            )
        while spent < seconds:
            rates = []
            for process in working:
                assert process.stdin is not None and process.stdout is not None
                print(file=process.stdin, flush=True)
                steps, took = process.stdout.readline().split()
                rates.append(int(steps) / float(took))
            spent += float(took)
            found.append(rates[1] / rates[0])
        for process in working:
            assert process.stdin is not None
            process.stdin.close()
    return found


def row(workload: str, ways: Sequence[str], seconds: float, size: Size = "full") -> str:
    """A line of the table."""
    cells = []
    for way in ways:
        found = speeds(workload, way, seconds, size)
        last = found[-max(1, len(found) // 3) :]
        cells.append(f"{statistics.harmonic_mean(found):.2f}, at last {statistics.median(last):.2f}")
    return f"| {workload} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.entering", description=__doc__)
    parser.add_argument("workload", nargs="*", help="names, or their beginnings")
    parser.add_argument("--seconds", type=float, default=60.0, help="of work of each process")
    parser.add_argument("--way", action="append", choices=[way for way in WAYS if way != "plain"], help="these alone")
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--here", choices=list(WAYS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.here:
        torch.set_num_threads(1)
        work(arguments.workload[0], arguments.here, arguments.size)
        return 0
    ways = arguments.way or [way for way in WAYS if way != "plain"]
    print(f"| workload | {' | '.join(WAYS[way].about for way in ways)} |\n|---|{'---|' * len(ways)}")
    for chosen in select(arguments.workload or DEFAULT):
        print(row(chosen.name, ways, arguments.seconds, arguments.size), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
