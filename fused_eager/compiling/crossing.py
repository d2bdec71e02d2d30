"""Crossing: many regions compiled for a target at once, each in a process that has XLA's compiler for it loaded."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fused_eager.cache import Key

from ..targets.target import Target
from ..xla import use_the_cpu_alone
from .cross import Crossed, Refusal, cross_compile_key

Outcome = Crossed | Refusal
Make = Callable[[Key, Target], Outcome]
_FATAL = re.compile(r"F\d{4} ")  # as Google's log has it


def _begin(folder: str) -> None:
    """In a new worker: what XLA says before it ends the process goes into a file, and it ends with its parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use_the_cpu_alone()
    said = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(said, 2)


def _end_with_parent() -> None:
    """A worker holds both ends of the pipes to its parent, so it would wait for a dead one for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def crossed(
    keys: Sequence[Key], target: Target, jobs: int, make: Make = cross_compile_key
) -> Iterator[tuple[Key, Outcome]]:
    """Compile the regions of keys, `jobs` at a time; each comes as it is done.

    XLA's compiler ends the process where it finds a mistake of its own. Then those that were being compiled are
    compiled alone, one by one, and the others go on.
    """
    left = dict.fromkeys(keys)
    while left:
        suspects: list[Key] = []
        for key, outcome in _together(list(left), target, jobs, make, suspects):
            del left[key]
            yield key, outcome
        for key in suspects:
            del left[key]
            ended: list[Key] = []
            yield from _together([key], target, 1, make, ended)
            if ended:
                yield key, Refusal(f"XLA's compiler ended its process: {_last_words or 'was there enough memory?'}")


_last_words = ""


def _together(
    keys: Sequence[Key], target: Target, jobs: int, make: Make, suspects: list[Key]
) -> Iterator[tuple[Key, Outcome]]:
    """Compile in one set of processes. If one of them ends, stop, and say which keys were under way."""
    global _last_words
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fused-eager-crossing-") as folder:
        with _pool(min(jobs, len(keys)), context, folder) as pool:
            waiting, asked = list(keys)[::-1], dict[concurrent.futures.Future[Outcome], Key]()
            broken = False
            while (waiting and not broken) or asked:
                while waiting and not broken and len(asked) < jobs:  # those that wait are no suspects
                    key = waiting.pop()
                    try:
                        asked[pool.submit(make, key, target)] = key
                    except BrokenProcessPool:
                        broken = True
                done, _ = concurrent.futures.wait(asked, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    key = asked.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenProcessPool:
                        broken = True
                        suspects.append(key)
                    else:
                        yield key, outcome
        if broken:
            _last_words = _said(Path(folder))


@contextmanager
def _pool(jobs: int, context: Any, folder: str) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that compile. Where the body is left early, as by a Ctrl-C, they are ended: a region may take minutes,
    and XLA heeds no signal."""
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _begin, (folder,)) as pool:
        try:
            yield pool
        except BaseException:
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.kill()
            raise


def _said(folder: Path) -> str:
    """What ended a process, in its own words: the line that says what was checked and failed, or else the last one."""
    texts = [path.read_text(errors="replace") for path in folder.iterdir()]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if _FATAL.match(line)]
    return " ".join((fatal or lines or [""])[0].split())[:300]


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
