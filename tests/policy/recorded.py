"""Steps as a machine really takes them, for the simulator: `python -m tests.policy.recorded > recorded.json`.

Each program runs plain and in a context that does not choose, in turns of half a second; what each step took is kept,
in microseconds, turn by turn: two turns side by side found the machine in about the same state. It was run on a machine
with two cores while other programs came and went on both.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
PROGRAMS = ("mlp_adam_loop", "layernorm_gelu_residual", "nbody")
TURNS, TURN_S = 16, 0.5

Turns = list[list[float]]


def read() -> dict[str, dict[str, Turns]]:
    """Of each program the seconds of its steps, `fused` and `native`, in each turn."""
    kept = json.loads(FILE.read_text())
    return {
        program: {way: [[us / 1e6 for us in steps] for steps in turns] for way, turns in ways.items()}
        for program, ways in kept.items()
    }


def record(program: str) -> dict[str, list[list[int]]]:
    """Run it, one way and the other."""
    import torch

    from benchmarks.first_minute import EVERY
    from fused_eager import fused_eager

    torch.set_num_threads(1)
    step = EVERY[program].build(lambda function: function, "full")
    found: dict[str, list[list[int]]] = {"native": [], "fused": []}

    def turn(way: str, seconds: float) -> None:
        until = time.perf_counter() + seconds
        found[way].append([])
        while (began := time.perf_counter()) < until:
            out = step()
            if isinstance(out, torch.Tensor):
                out.sum().item()  # what the step has computed is to be there
            found[way][-1].append(round(1e6 * (time.perf_counter() - began)))

    for _ in range(2):  # the first turns compile
        found["native"].clear()
        found["fused"].clear()
        for _ in range(TURNS):
            turn("native", TURN_S)
            with fused_eager(native="never", compile="wait"):
                turn("fused", TURN_S)
    return found


if __name__ == "__main__":
    kept = {}
    for name in PROGRAMS:
        print(name, file=sys.stderr, flush=True)
        kept[name] = record(name)
    json.dump(kept, sys.stdout, separators=(",", ":"))
    print()
