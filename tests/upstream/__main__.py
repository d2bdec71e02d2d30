"""PyTorch's own tests inside a context: `python -m tests.upstream FOLDER --modes wait,strict --files test_autograd.py`.

Every test runs without the library first; those that pass are run in each mode. Prints what does not pass there, with
what it says; ends with 1 if one of these is not accepted (`accepted.py`). With `--device tpu` the tests that PyTorch
generates for each device are run on it, and compared with the same tests on the CPU, without the library.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .accepted import reason_for
from .plugin import DEVICE_MODES, MODES, PLAIN
from .runs import PASSED, SKIPPED, Outcome, files_of, outcomes

LOST = Outcome("failed", "no result: its process crashed, or it was not collected")


def main(argv: list[str] | None = None) -> int:
    """Compare, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("folder", type=Path, help="of PyTorch's tests, or a part of it")
    parser.add_argument("--modes", default="", help=f"comma-separated, of {', '.join(MODES)}; all if none")
    parser.add_argument("--device", default="", help=f"on it, in the modes {', '.join(DEVICE_MODES)}; strict if none")
    parser.add_argument("--files", nargs="*", default=[], help="relative to the folder; all of its test_*.py if none")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="as pytest's -k")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    args = parser.parse_args(argv)
    allowed = DEVICE_MODES if args.device else tuple(MODES)
    modes = args.modes.split(",") if args.modes else ["strict"] if args.device else list(MODES)
    for mode in modes:
        if mode not in allowed:
            parser.error(f"there is no mode {mode!r}; allowed are {', '.join(allowed)}")
    folder = args.folder.resolve()
    try:
        files = files_of(folder, args.files)
    except FileNotFoundError as error:
        parser.error(str(error))
    names = [f"{args.device}, {mode}" if args.device else mode for mode in modes]
    totals = dict.fromkeys(names, 0)
    differing: dict[str, dict[str, Outcome]] = {mode: {} for mode in names}
    for file in files:
        name = str(file.relative_to(folder))

        def run(mode: str, device: str = "", file: Path = file) -> dict[str, Outcome]:
            return outcomes(folder, file, mode, args.workers, args.timeout, args.select, device)

        plain = [test for test, outcome in run(PLAIN).items() if outcome.kind == PASSED]
        for mode in modes:
            found, passing = run(mode, args.device), plain
            if args.device:
                # What is for the CPU alone is not generated for a device, or skipped on one.
                passing = [test for test in plain if test in found and found[test].kind != SKIPPED]
            mode = f"{args.device}, {mode}" if args.device else mode
            here = {f"{name}::{test}": found.get(test, LOST) for test in passing}
            here = {test: outcome for test, outcome in here.items() if outcome.kind != PASSED}
            totals[mode] += len(passing)
            differing[mode].update(here)
            print(f"{name} {mode}: {len(passing)} pass plain, {len(here)} of them do not here", flush=True)
            for test, outcome in here.items():
                why = reason_for(test, mode) or "NOT ACCEPTED"
                print(f"    {test} | {outcome.said or outcome.kind} | {why}", flush=True)
    return _judge(totals, differing)


def _judge(totals: dict[str, int], differing: dict[str, dict[str, Outcome]]) -> int:
    bad = 0
    for mode, total in totals.items():
        refused = [test for test in differing[mode] if reason_for(test, mode) is None]
        bad += len(refused)
        passed = total - len(differing[mode])
        print(
            f"upstream {mode}: {passed} of {total} pass ({passed / max(total, 1):.2%}), "
            f"{len(differing[mode]) - len(refused)} differ as accepted, {len(refused)} not"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
