"""What is done at the end of a process, also of one that `multiprocessing` forked, where no hook of `atexit` runs."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
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
    error = sys.exc_info()[1] or _ended_by
    if isinstance(error, SystemExit):  # torch.multiprocessing writes the error down, and leaves by this
        error = error.__context__ if error.code else None
    return error


_ended_by: BaseException | None = None


def _note_errors() -> None:
    """Note what a process of `multiprocessing` ends by, one whose start is still to come."""
    original: Callable[..., Any] = BaseProcess._bootstrap  # type: ignore[attr-defined]

    @functools.wraps(original)
    def bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        run = process.run

        def noting() -> None:
            global _ended_by
            try:
                run()
            except BaseException as error:
                _ended_by = error
                raise

        process.run = noting
        return original(process, *args, **kwargs)

    BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]


# Since Python 3.13 the end comes after that, and the error has been printed and forgotten.
if "_exit_function" not in BaseProcess._bootstrap.__code__.co_names:  # type: ignore[attr-defined]
    _note_errors()


class _Ending:
    """One call, made once."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self.function, self.args = function, args
        self.is_done = False

    def __call__(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.function(*self.args)
