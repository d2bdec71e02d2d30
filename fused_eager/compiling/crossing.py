"""Crossing: many regions compiled for a target at once, each in a process that has XLA's compiler for it loaded."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from fused_eager.cache import Key

from ..targets.target import Target
from ..xla import use_the_cpu_alone
from .cross import Crossed, Refusal, cross_compile_key

Outcome = Crossed | Refusal


def _begin() -> None:
    """In a new worker."""
    use_the_cpu_alone()


def crossed(keys: Sequence[Key], target: Target, jobs: int) -> Iterator[tuple[Key, Outcome]]:
    """Compile the regions of keys, `jobs` at a time; each comes as it is done."""
    if not keys:
        return
    left = dict.fromkeys(keys)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(keys)), context, _begin) as pool:
        asked = {pool.submit(cross_compile_key, key, target): key for key in keys}
        try:
            for done in concurrent.futures.as_completed(asked):
                outcome = done.result()
                del left[asked[done]]
                yield asked[done], outcome
        except BrokenProcessPool:
            pass
    for key in left:
        yield key, Refusal("the process that compiled it, or one beside it, ended: was there enough memory?")


class Bar:
    """A line of progress on stderr: a bar that is drawn over itself in a terminal, elsewhere a line now and then."""

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic):
        self.total, self.what, self.done, self.failed = total, what, 0, 0
        self._clock, self._began, self._told = clock, clock(), clock()
        self._draws = sys.stderr.isatty()

    def step(self, failed: bool = False) -> None:
        """One more is done."""
        self.done += 1
        self.failed += failed
        now, last = self._clock(), self.done == self.total
        if not (self._draws or last or now - self._told >= 10):
            return
        self._told = now
        full = 30 * self.done // max(self.total, 1)
        left = (now - self._began) / self.done * (self.total - self.done)
        line = (
            f"{self.what} [{'#' * full}{'.' * (30 - full)}] {self.done}/{self.total}"
            f"{f', {self.failed} failed' if self.failed else ''}, {now - self._began:.0f} s, {left:.0f} s to go"
        )
        print(f"\r{line}" if self._draws else line, end="\n" if last or not self._draws else "", file=sys.stderr)
