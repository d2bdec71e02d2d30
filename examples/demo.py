"""What `make demo` runs: train_gpt.py from one seed, plain, Strict, Fused and on the device. It knows nothing of them.

    python examples/demo.py
    python examples/demo.py --modes off,fused --steps 100 --layers 6

Compares the losses step by step (exit code 1 where they differ), gives the steps/s of each mode and the report.
Arguments that are not the demo's own go to train_gpt.py.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST_DIFFERENCE = 1e-3  # relative, between a loss of plain PyTorch and the same step's loss in another mode
SIZE = ["--layers=4", "--dim=128", "--seq=64", "--batch=8", "--steps=40", "--eval-every=20", "--sample=60"]
MODES = ("off", "strict", "fused", "debug", "tpu")


@dataclass
class Run:
    mode: str
    losses: list[float]
    steps_per_s: float | None
    seconds: float
    sample: str


def run(mode: str, arguments: list[str]) -> Run:
    """Train the GPT in `mode`; "tpu" is the device, with the random numbers that CPU tensors get."""
    print(f"\n== {mode} ==", flush=True)
    import train_gpt

    from fused_eager import fused_eager, register, report

    report(reset=True)  # the one at the end is about the last mode alone
    start = time.perf_counter()
    if mode == "tpu":
        os.environ["FUSED_EAGER_RNG"] = "torch_cpu"
        register("tpu")
        result = train_gpt.train(train_gpt.parse([*arguments, "--device=tpu"]))
    else:
        # By default nobody waits for the compiler; here a steady state is to be seen within forty steps.
        with fused_eager(mode=mode, compile="wait"):
            result = train_gpt.train(train_gpt.parse(arguments))
    return Run(mode, result.losses, result.steps_per_s, time.perf_counter() - start, result.sample)


def difference(run: Run, plain: Run) -> tuple[float, int]:
    """The largest relative difference between two runs' losses and its step, counted from 1. NaN: infinity."""
    pairs = zip(run.losses, plain.losses, strict=True)
    relative = [math.inf if math.isnan(a) or math.isnan(b) else abs(a - b) / abs(b) for a, b in pairs]
    worst = max(relative)
    return worst, relative.index(worst) + 1


def compare(runs: Sequence[Run]) -> bool:
    """Print the table of all runs against the first. Returns whether all losses agree."""
    plain, agree = runs[0], True
    print(f"\n{'mode':8}{'steps/s':>9}{'against ' + plain.mode:>14}{'whole run':>12}   largest difference of a loss")
    for run in runs:
        speed = f"{run.steps_per_s:.2f}" if run.steps_per_s else "-"
        ratio = f"{run.steps_per_s / plain.steps_per_s:.2f}x" if run.steps_per_s and plain.steps_per_s else "-"
        worst, step = difference(run, plain)
        agree = agree and worst <= LARGEST_DIFFERENCE
        words = f"{worst:.1e} (step {step})" if worst else "none"
        print(f"{run.mode:8}{speed:>9}{ratio:>14}{run.seconds:>10.1f} s   {words}")
    print("steps/s is the steady state: the first 2 steps, evaluation and sampling are left out; the whole run is not.")
    return agree


def parse(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The modes, the plain one first, and the arguments for train_gpt.py."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--modes", default="off,strict,fused,tpu", help="what to run, with commas; off is the first")
    args, rest = parser.parse_known_args(argv)
    modes = [mode for mode in args.modes.split(",") if mode != "off"]
    for mode in modes:
        if mode not in MODES:
            parser.error(f"there is no mode {mode!r}; known: {', '.join(MODES)}")
    return ["off", *modes], rest


def main(argv: Sequence[str] | None = None) -> int:
    modes, rest = parse(argv)
    if "OMP_WAIT_POLICY" not in os.environ:
        # Has to happen before torch loads its OpenMP runtime, hence the imports inside functions.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        print("OMP_WAIT_POLICY=PASSIVE is set for all modes: spinning OpenMP threads would steal the cores from XLA's.")
    runs = [run(mode, SIZE + rest) for mode in modes]
    agree = compare(runs)
    written = {run.sample for run in runs}
    print("All modes wrote the same sample." if len(written) == 1 else "The samples differ between modes.")
    if len(modes) > 1:
        from fused_eager import report

        print(f"\n== report: {modes[-1]} ==\n{report()}")
    if not agree:
        print(f"\nlosses differ by more than {LARGEST_DIFFERENCE} from plain PyTorch's: this is a bug", file=sys.stderr)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
