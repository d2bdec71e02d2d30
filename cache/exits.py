"""What is done at the end of a process, also of one that `multiprocessing` forked, where no hook of `atexit` runs."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any


def call_at_exit(function: Callable[..., Any], *args: Any) -> None:
    """Calls the function once when this process ends in order: what came last is called first."""
    ending = _Ending(function, args)
    atexit.register(ending)
    # `multiprocessing` ends the processes that it forks by os._exit, and calls these before.
    Finalize(None, ending, exitpriority=0)


def error_at_exit() -> BaseException | None:
    """For a function that is called at the end: what a process of `multiprocessing` ends by, if it is an error.

    It is handled there before Python's `sys.excepthook` could see it.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch.multiprocessing writes the error down, and leaves by this
        error = error.__context__ if error.code else None
    return error


class _Ending:
    """One call, made once."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self.function, self.args = function, args
        self.is_done = False

    def __call__(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.function(*self.args)
