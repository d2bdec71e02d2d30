"""Correctness first, then time: alternating blocks in one process, medians and spreads of paired ratios."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.systems import REFERENCE, System
from benchmarks.workloads import Result, Size, Step, Workload

CHECKED_STEPS = 3
# Entering a context moves memory, and what was found to be faster takes hold after the first read.
WARM_STEPS = 3
# A steady state: nothing is compiled, and both ways of running, and torch alone, have been tried (four times each).
QUIET_STEPS = 20
_DIFFERENT_DROPOUT = 0.1  # relative: other dropout masks move a loss of the first steps by less than this


@dataclass(frozen=True)
class Effort:
    """How long to measure. `block_s`: seconds that a block of steps should take at least; `settle_s`: the most that a
    system may take to reach its steady state."""

    rounds: int = 9
    block_s: float = 0.25
    settle_s: float = 60.0


QUICK = Effort(rounds=3, block_s=0.05, settle_s=20.0)


@dataclass
class Timing:
    """One system on one workload. `ratio` is against plain eager, round by round; below 1 is faster."""

    seconds: float = math.nan  # per step, the median over rounds
    spread: float = math.nan  # of `seconds`: the interquartile range
    ratio: float = math.nan  # the median of the rounds' ratios
    ratio_spread: float = math.nan
    compiled_while_timed: int | None = None  # 0 in a steady state
    settled: bool = True  # False: still compiling when the time for settling was over
    difference: float = math.nan  # the largest difference from plain eager's results that the check saw
    failure: str = ""  # why there is no time


@dataclass
class _Runner:
    """A workload in a system, with its own state."""

    system: System
    workload: Workload
    step: Step
    settled: bool = True
    compiled: int = 0

    def once(self) -> Result:
        """One step until its result exists. Training steps have read their loss; a result is alive while we wait."""
        result = self.step()
        if not self.workload.trains:
            self.system.sync()
        return result

    def block(self, steps: int) -> float:
        """Seconds per step over a block, the wait at its end included. The first steps after a change are not timed.

        Training is not synchronized within: it goes on from memory that the system keeps, as in a loop of thousands of
        steps, of which a block has a handful.
        """
        gc.collect()
        before = self.system.compilations() or 0
        with self.system.enter():
            for _ in range(WARM_STEPS):
                self.once()
            self.system.wait()
            start = time.perf_counter()
            for _ in range(steps):
                self.once()
            self.system.wait()
            seconds = time.perf_counter() - start
        self.compiled += (self.system.compilations() or 0) - before
        return seconds / steps


def _as_tensors(result: Result) -> list[Tensor]:
    if isinstance(result, float):
        return [torch.tensor(result, dtype=torch.float64)]
    return result if isinstance(result, list) else [result]


def _fetched(system: System, result: Result) -> Result:
    return result if isinstance(result, float) else [system.fetch(tensor) for tensor in _as_tensors(result)]


def first_results(workload: Workload, system: System, size: Size) -> tuple[_Runner, list[Tensor]]:
    """Set the workload up in the system. Returns what runs it on, and the results of its first steps, on the CPU."""
    with system.enter():
        with system.place():
            step = workload.build(system.wrap, size)
        runner = _Runner(system, workload, step)
        system.sync()
        results = [runner.once() for _ in range(CHECKED_STEPS)]
        system.sync()
        fetched = [_fetched(system, result) for result in results]
    # Numbers become tensors out here: an op of ours in there would be one more op of the step.
    return runner, [tensor for result in fetched for tensor in _as_tensors(result)]


def compare(workload: Workload, system: System, ours: Sequence[Tensor], plain: Sequence[Tensor]) -> tuple[float, bool]:
    """The largest absolute difference of two runs' results, and whether all of them are equal within the tolerance."""
    loose = workload.draws and not system.same_random
    rtol = _DIFFERENT_DROPOUT if loose else workload.rtol
    worst, equal = 0.0, len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=False):
        if not system.same_dtypes:
            a = a.to(b.dtype)
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf, False
        difference = (a.double() - b.double()).abs().max().item()
        worst = math.inf if math.isnan(difference) else max(worst, difference)
        equal = equal and torch.allclose(a, b, rtol, workload.atol)
    return worst, equal


def _settle(runner: _Runner, seconds: float) -> None:
    """Run until so many steps in a row have compiled nothing, or the time is over."""
    start, quiet = time.perf_counter(), 0
    seen = runner.system.compilations()
    with runner.system.enter():
        while quiet < QUIET_STEPS:
            if time.perf_counter() - start > seconds:
                runner.settled = False
                return
            runner.once()
            runner.system.finish()
            now = runner.system.compilations()
            quiet, seen = (quiet + 1 if now == seen and not runner.system.waiting() else 0), now


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _summary(runner: _Runner, times: list[float], plain: list[float], difference: float) -> Timing:
    ratios = [ours / eager for ours, eager in zip(times, plain, strict=True)]
    return Timing(
        seconds=statistics.median(times),
        spread=_spread(times),
        ratio=statistics.median(ratios),
        ratio_spread=_spread(ratios),
        compiled_while_timed=None if runner.system.compilations() is None else runner.compiled,
        settled=runner.settled,
        difference=difference,
    )


def timed(runner: _Runner, effort: Effort) -> Timing:
    """One system alone, once it has settled; its ratio is to itself."""
    _settle(runner, effort.settle_s)
    steps = _block_length(runner, effort.block_s)
    runner.compiled = 0
    times = [runner.block(steps) for _ in range(effort.rounds)]
    return _summary(runner, times, times, 0.0)


def measure(workload: Workload, systems: Sequence[System], effort: Effort, size: Size = "full") -> dict[str, Timing]:
    """Time plain eager and `systems` on one workload, block by block in turn. Returns a timing per system's name.

    A system whose first results differ from plain eager's, or that raises, gets a `failure` and no time.
    """
    plain, expected = first_results(workload, REFERENCE, size)
    runners, timings, differences = [plain], {}, {REFERENCE.name: 0.0}
    for system in systems:
        try:
            runner, results = first_results(workload, system, size)
            worst, equal = compare(workload, system, results, expected)
            if equal:
                _settle(runner, effort.settle_s)
        except Exception as error:  # whatever a system does wrong is a line of the table, not the end of the others
            timings[system.name] = Timing(failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            continue
        differences[system.name] = worst
        if equal:
            runners.append(runner)
        else:
            timings[system.name] = Timing(difference=worst, failure=f"wrong results: off by {worst:.2g}")
    _settle(plain, effort.settle_s)
    lengths = [_block_length(runner, effort.block_s) for runner in runners]
    times: list[list[float]] = [[] for _ in runners]
    for runner in runners:
        runner.compiled = 0
    for _ in range(effort.rounds):
        for runner, steps, blocks in zip(runners, lengths, times, strict=True):
            blocks.append(runner.block(steps))
    for runner, blocks in zip(runners, times, strict=True):
        name = runner.system.name
        timings[name] = _summary(runner, blocks, times[0], differences[name])
    return timings


def _block_length(runner: _Runner, seconds: float) -> int:
    once = min(runner.block(1) for _ in range(2))
    return max(1, min(2000, math.ceil(seconds / once)))
