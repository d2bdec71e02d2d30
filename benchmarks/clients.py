"""Steady loops of the libraries that people run most: `python -m benchmarks.clients [PROGRAM...]`.

Each program runs four times, from an empty cache: plain and in a context in turns, then on the device in mode strict
and in mode fused in turns. Time is the wall clock's of each one's own turns. What is told is the work of the last turns
over the other's in the turns beside them: of the context over plain PyTorch's, of fused over strict; and how many
regions the device has compiled after its third step. What the clients print is in the file that `--log` names.

They have to be installed: `make .venv/.made-clients`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import client_programs
from benchmarks.environment import wanted
from benchmarks.first_minute import Turn
from benchmarks.probe import empty_caches
from benchmarks.systems import SYSTEMS, no_wait, regions_compiled
from benchmarks.turns import Over, Turns, Working, ended

PROGRAMS = (
    "trainer", "generate", "accelerate", "peft", "trl", "lightning", "torchtitan", "diffusers", "timm", "nano_gpt",
)  # fmt: skip
NOT_ON_CPU = {"torchtitan"}  # takes an accelerator, or nothing
# What lies in a folder of its own, for it breaks others that find it.
BESIDE = {"timm": "torchvision", "torchtitan": "torchtitan"}
LAST = 15  # turns that count, at the end
HEAD = """\
| program | plain, a step | context, its speed over plain's | strict, a step | fused, its speed over strict's \
| compiled after the third step: strict | fused |
|---|---|---|---|---|---|---|"""


@dataclass
class Pair:
    """Two ways to run a program: all their turns, and what each has compiled after its third step."""

    turns: list[Turn]
    late: tuple[int, int]

    @property
    def ratio(self) -> float:
        """The work of the second over the first's, median of the last turns."""
        return statistics.median(turn.ours / turn.plain for turn in self.turns[-LAST:])


def work(program: str, way: str) -> None:
    """In a process of its own: a program in the turns that it is given."""
    torch.set_num_threads(1)
    device = "tpu" if way in ("strict", "fused") else "cpu"
    wait = no_wait
    if device == "tpu":
        import fused_eager

        fused_eager.register("tpu")
        wait = torch.tpu.synchronize  # type: ignore[attr-defined]
    counting = regions_compiled if way != "plain" else lambda: 0
    at_third: list[int] = []
    with contextlib.suppress(Over), SYSTEMS["fused" if way == "context" else "eager"].enter():
        turns = Turns(wait, lambda: counting() - at_third[0] if at_third else 0)

        def step() -> None:
            turns.step()
            if turns.all == 3:
                at_third.append(counting())

        getattr(client_programs, program)(device, step)


def pair(program: str, ways: tuple[str, str], turns: int, log: Path) -> Pair:
    """Two ways in turns, after a turn each for what comes before the first step."""
    with empty_caches() as environment, log.open("a") as said:
        environment.update(wanted(1, "default"))
        paths = [os.getcwd(), *(str(Path(sys.prefix, "beside", name)) for name in [BESIDE.get(program)] if name)]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])

        def process(way: str) -> Working:
            mode = {"FUSED_EAGER_MODE": way} if way in ("strict", "fused") else {}
            command = [sys.executable, "-m", "benchmarks.clients", "--here", way, program]
            return Working(command, {**environment, "FUSED_EAGER_PROGRESS": "0", **mode}, said)

        first, second = (process(way) for way in ways)
        found = []
        with ended(first, second):
            first.turn()
            second.turn()
            for _ in range(turns):
                before = first.turn()[0]
                found.append(Turn(before, *second.turn()))
        return Pair(found, (int(first.told), int(second.told)))


def row(program: str, turns: tuple[int, int], log: Path) -> dict[str, Pair | str]:
    """Both pairs; a sentence where one did not run."""
    found: dict[str, Pair | str] = {}
    pairs = (("context", ("plain", "context")), ("device", ("strict", "fused")))
    for (name, ways), count in zip(pairs, turns, strict=True):
        if name == "context" and program in NOT_ON_CPU:
            found[name] = "does not run on plain CPU tensors"
            continue
        try:
            found[name] = pair(program, ways, count, log)
        except RuntimeError as error:
            found[name] = f"{error}; see {log}"
    return found


def told(found: Pair | str, late: bool) -> str:
    """A cell or two of the table."""
    if isinstance(found, str):
        return f"{found} | " + ("| | " if late else "")
    step = f"{1000 / statistics.median(t.plain for t in found.turns[-LAST:]):.0f} ms"
    cells = [step, f"{found.ratio:.2f}", *(map(str, found.late) if late else ())]
    return " | ".join(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a program did not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("program", nargs="*", help=f"of {', '.join(PROGRAMS)}; by default all")
    parser.add_argument("--turns", type=int, default=75, help="of a second, plain and in a context (default 75)")
    parser.add_argument("--device-turns", type=int, default=30, help="the same on the device (default 30)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), metavar="FILE", help="what the clients print")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.program if name not in PROGRAMS]
    if unknown:
        parser.error(f"no program {unknown[0]!r}; there are {', '.join(PROGRAMS)}")
    if arguments.here:
        work(arguments.program[0], arguments.here)
        return 0
    print(HEAD)
    rows: dict[str, dict[str, Pair | str]] = {}
    for program in arguments.program or PROGRAMS:
        rows[program] = found = row(program, (arguments.turns, arguments.device_turns), arguments.log)
        print(f"| {program} | {told(found['context'], False)} | {told(found['device'], True)} |", flush=True)
    if arguments.json:
        kept = {p: {n: f if isinstance(f, str) else asdict(f) for n, f in found.items()} for p, found in rows.items()}
        arguments.json.write_text(json.dumps(kept))
    failed = [f for found in rows.values() for f in found.values() if isinstance(f, str) and "see" in f]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
