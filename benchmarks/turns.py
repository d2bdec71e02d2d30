"""Processes that work in turns: while one works, the others are stopped, with all that they have started.

So what compiles has the other cores in its own process's turns alone, and each turn is compared with the turn of
another process that came just before. `Working` is a process from outside; `Turns` is what it keeps inside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

TURN_S = 1.0


class Over(BaseException):
    """The last turn is over. Raised out of whatever loop calls `Turns.step`; frameworks catch an `Exception`."""


class Turns:
    """A process's own side: it reads how long a turn is to take, and answers with what was done in it.

    What the program prints goes to the standard error, for the answers are alone on the standard output.
    """

    def __init__(self, wait: Callable[[], None], told: Callable[[], Any] = lambda: 0):
        """`wait` waits for what was begun in a turn; `told` is what an answer says beside steps and seconds."""
        self.wait, self.told = wait, told
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.all = 0  # steps, in all turns
        self._begin()

    def step(self) -> None:
        """A step has been done.

        Raises Over if it was the last.
        """
        self.all += 1
        if time.perf_counter() - self.began < self.seconds:
            return
        self.wait()
        print(self.all - self.before, time.perf_counter() - self.began, self.told(), file=self.answers)
        self._begin()

    def _begin(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise Over
        self.seconds, self.before, self.began = float(line), self.all, time.perf_counter()


class Working:
    """A process that works in its turns and is stopped between them."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], errors: TextIO | None = None):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self.told = ""  # what its last answer said beside steps and seconds
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float = TURN_S) -> tuple[float, float]:
        """Let it work; steps for each second, and seconds. The first has all that comes before the first step.

        Raises RuntimeError if it has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        print(seconds, file=self.process.stdin, flush=True)
        self._signal(signal.SIGCONT)
        answer = self.process.stdout.readline().split()
        self._signal(signal.SIGSTOP)
        if not answer:
            raise RuntimeError("the program has ended")
        steps, took, self.told = int(answer[0]), float(answer[1]), answer[2]
        return steps / took, took

    def end(self) -> None:
        """Let it end in order, so that what it compiled is kept."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextmanager
def ended(*processes: Working) -> Iterator[None]:
    """After the body, processes end."""
    try:
        yield
    finally:
        for process in processes:
            process.end()
