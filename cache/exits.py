"""What is done at the end of a process, also of one that `multiprocessing` forked, where no hook of `atexit` runs."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
import threading
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


FAILED = 120  # Python's own exit code for what fails while a process ends
_LAST = -(1 << 30)  # of multiprocessing's finalizers


def fail_at_exit(error: BaseException) -> None:
    """Have this process, which is at its end, end in failure: the error is written as one that nobody has caught, and
    the exit code is `FAILED`. All else that is done at the end is done.

    Does nothing where it ends by an error, or with a code other than 0, of its own (of codes those that `sys.exit` was
    given count, see `note_codes`), or for an error that was here before.
    """
    global _fails
    if _fails or has_failed():
        return
    _fails = True
    sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr = _Unflushable(sys.stderr)
    Finalize(None, _fail_child, exitpriority=_LAST)


_fails = False


class _Unflushable:
    """`sys.stderr` at the end: that it cannot be flushed when all else is done is how Python knows of a failure."""

    closed = False

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream. Raises OSError when the interpreter is taken down."""
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("the process has failed at its end")


def _fail_child() -> None:
    """The last that a process of `multiprocessing` does: one that was forked does not take its interpreter down."""
    if multiprocessing.parent_process() is None or has_failed():
        return
    if _ENDS_IN_BOOTSTRAP:
        raise SystemExit(FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


def has_failed() -> bool:
    """For a function that is called at the end: whether the process ends by an error, or with a code other than 0."""
    error = sys.exc_info()[1] or _ended_by
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None or hasattr(sys, "last_value") or _code not in (None, 0)


_code: Any = None  # what `sys.exit` was given last


@functools.cache
def note_codes() -> None:
    """Note from now on with which code the program ends by `sys.exit`: Python tells nobody."""
    original: Callable[..., Any] = sys.exit

    @functools.wraps(original)
    def exit(*args: Any) -> Any:
        global _code
        if threading.current_thread() is threading.main_thread():  # else it ends the thread alone
            _code = args[0] if args else None
        return original(*args)

    sys.exit = exit


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
_ENDS_IN_BOOTSTRAP = "_exit_function" in BaseProcess._bootstrap.__code__.co_names  # type: ignore[attr-defined]
if not _ENDS_IN_BOOTSTRAP:
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
