"""What only a fresh process can tell: the first steps, what they compiled, and peak memory.

`probe()` runs `python -m benchmarks.probe WORKLOAD SYSTEM` twice with compile caches that are empty at the start: the
first process is the cold one; the second finds what the first compiled, and goes on until its memory is worth
comparing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.systems import SYSTEMS, System, no_wait
from benchmarks.workloads import WORKLOADS, Size, Step

# Per process. The first half is what a user meets, in the second each step waits until what it wants compiled is
# compiled.
STEPS = 8
# Seconds of steps after those until memory is looked at, and while it is: choosing between two ways to run, and giving
# back what the first steps left, take a few.
SETTLE_S, LAST_S = 8.0, 3.0
_CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")  # where the systems look for what was compiled before
_ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Sample:
    """One fresh process. Setting up (model, data, optimizer) is in none of the figures."""

    load_s: float  # until the system has run `ones(4) + 1`: its imports, its client, its first tiny compilation
    step_s: list[float]
    compilations: list[int | None]  # after each step, without the one of loading; None where nobody counts
    base_mb: float  # resident set once the system is loaded
    first_peak_mb: float  # the largest resident set of these steps, compiling included
    steady_peak_mb: float | None  # the same of later ones, once the loop has run for a while; None if it has not


@dataclass
class Probe:
    """The first process, with nothing compiled anywhere, and the second."""

    cold: Sample
    warm: Sample


def _resident_mb(field: str) -> float:
    """A field of /proc/self/status in MiB; without such a file, the peak resident set for any field."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        unit = 1024**2 if sys.platform == "darwin" else 1024  # macOS counts in bytes, everybody else in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def _forget_peak() -> None:
    """Start the kernel's peak again from here. Where it cannot, the peak stays the whole process's: an upper bound."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except (FileNotFoundError, PermissionError):
        return


def seconds_of(step: Step, system: System) -> float:
    """What one step takes until its result is there."""
    start = time.perf_counter()
    result = step()
    system.sync()
    seconds = time.perf_counter() - start
    del result
    return seconds


def sample(workload_name: str, system_name: str, size: Size, settle_s: float = 0.0) -> Sample:
    """Run the workload for a few steps in this process, which must be fresh, and then, if its memory in the steady
    state is asked for, for `settle_s` seconds and somewhat more."""
    workload, system = WORKLOADS[workload_name], SYSTEMS[system_name]
    start = time.perf_counter()
    add_one = system.wrap(lambda x: x + 1)
    with system.enter():
        ones = add_one(torch.ones(4))
        system.sync()
    load_s = time.perf_counter() - start
    del ones
    loaded, base = system.compilations(), _resident_mb("VmRSS")

    with system.place():
        step = workload.build(system.wrap, size)
    seconds: list[float] = []
    compilations: list[int | None] = []
    with system.enter():
        for number in range(STEPS):
            seconds.append(seconds_of(step, system))
            if number >= STEPS // 2:
                system.finish()
            count = system.compilations()
            compilations.append(None if count is None or loaded is None else count - loaded)
        first_peak = _resident_mb("VmHWM")
        steady_peak = None
        if settle_s:
            sync = no_wait if workload.trains else system.sync  # training has read its loss, and does no more in a loop
            _run_for(settle_s, step, sync)
            _forget_peak()
            _run_for(LAST_S, step, sync)
            steady_peak = _resident_mb("VmHWM")
    return Sample(load_s, seconds, compilations, base, first_peak, steady_peak)


def _run_for(seconds: float, step: Step, sync: Callable[[], None]) -> None:
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        result = step()
        sync()
        del result


def probe(
    workload: str, system: str, size: Size = "full", settle_s: float = SETTLE_S, timeout_s: float = 900.0
) -> Probe:
    """Both samples of a workload in a system. The second goes on for `settle_s` seconds until memory is looked at.

    Raises RuntimeError as `fresh` does.
    """
    command = [sys.executable, "-m", "benchmarks.probe", workload, system, "--size", size]
    with empty_caches() as environment:
        cold = Sample(**fresh(command, environment, timeout_s))
        warm = Sample(**fresh([*command, "--settle", str(settle_s)], environment, timeout_s))
    return Probe(cold, warm)


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """The environment of processes that find nothing compiled but what they compile. The compiled follower is there: it
    is the library's, and no compiled region: what a user has who has run any program before."""
    from fused_eager.follower import build

    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "FUSED_EAGER_CACHE"}
        environment.update({name: str(Path(folder, name.lower())) for name in _CACHES})
        build.lend(Path(environment[_CACHES[0]], "fused_eager"))
        yield environment


def fresh(command: Sequence[str], environment: dict[str, str], timeout_s: float) -> Any:
    """What a process of its own prints as JSON, in its last line.

    Raises RuntimeError with the last line that it wrote if it fails or takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {timeout_s:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe")
    parser.add_argument("workload")
    parser.add_argument("system")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--settle", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args(argv)
    print(json.dumps(asdict(sample(args.workload, args.system, args.size, args.settle))))


if __name__ == "__main__":
    main(sys.argv[1:])
