"""Signals: while a context of the main thread is open, a handler of the program's runs between the program's own lines.

Python calls handlers between any two bytecodes of the main thread, the runtime's included. The middle of a flush is no
place for a checkpoint that a handler saves on SIGTERM, nor for the exception that Ctrl-C raises: what a region has
computed and nobody holds yet would be lost. So a signal that finds the main thread in the runtime is sent once more, a
moment later, until it finds it elsewhere; and not where Python prints and forgets what a handler raises, as in what the
collector calls: it would be lost there, and collections wait for the end of the runtime as signals do.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the one of Python makes enums, which takes ten times as long
import _thread
import _weakrefset
import functools
import gc
import importlib.util
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from ...compiling import background
from ...compiling.compile import load_or_compile
from ...devices.buffer import LOCK
from ...executing.run import Execution
from ...folder import FOLDER
from ...quiet import inside, stack
from . import composites, guards, readers, tracers
from .threads import current_door

FIRST, LONGEST = 5e-4, 5e-3  # seconds until a signal is sent again: doubled each time
# And until Ctrl-C interrupts the runtime all the same: whoever has waited so long wants to know where it is.
PATIENCE = 10.0

# Whatever it has called is the program, a module of the standard library's too.
_LAUNCHER = os.path.join(FOLDER, "commands", "launch.py")
_LIBRARIES = tuple(
    os.path.dirname(str(spec.origin)) + os.sep for spec in map(importlib.util.find_spec, ("torch", "jax")) if spec
)  # JAX is not imported yet
_STANDARD = os.path.dirname(threading.__file__) + os.sep
_REFERENCES = (weakref.__file__, _weakrefset.__file__)  # what they define is mostly called as an object goes
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")  # lies there too
_NUMBERS = sorted(int(number) for number in signal.valid_signals())
_WAITS = frozenset({load_or_compile.__code__, background.Queue.wait.__code__})

_contexts = 0  # of the main thread, that are open
_later: dict[int, Later] = {}  # by signal, while they are
_set, _get = signal.signal, signal.getsignal


class Later:
    """What stands for a handler of the program's."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self.handler = handler
        self.since = 0.0  # when a signal came that the handler is still to be told of; 0 if none has
        self.pause = FIRST

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if is_within(frame) and not self._interrupts(frame):
            self.since = self.since or time.monotonic()
            pause, self.pause = self.pause, min(2 * self.pause, LONGEST)
            # Not a `threading.Thread`: what has been interrupted may hold the locks that starting one takes.
            _thread.start_new_thread(self._send, (number, pause))
            return None
        self.since, self.pause = 0.0, FIRST
        return self.handler(number, frame)

    def _send(self, number: int, pause: float) -> None:
        time.sleep(pause)
        main = threading.main_thread().ident
        if self.since and main is not None:
            signal.pthread_kill(main, number)

    def _interrupts(self, frame: FrameType | None) -> bool:
        """Whether it is Ctrl-C, and has waited too long, or nothing is lost by it here."""
        if self.handler is not signal.default_int_handler:
            return False
        return (bool(self.since) and time.monotonic() - self.since > PATIENCE) or _is_waiting(frame)


def is_within(frame: FrameType | None) -> bool:
    """Whether what runs in `frame` belongs to the runtime: a signal would find its work half done."""
    if LOCK._is_owned() or inside() or _in_an_op() or _forgets(frame):  # type: ignore[attr-defined]
        return True
    while frame is not None:
        ours = _is_ours(frame.f_code.co_filename)
        if ours is not None:
            return ours
        frame = frame.f_back
    return False


def _in_an_op() -> bool:
    """Whether torch is on its way to our mode, or comes from there, where Python of its own runs, below autograd; or in
    a backward pass, which in eager is no place between two lines."""
    if torch._C._current_graph_task_id() != -1:
        return True
    door = current_door()
    if door is not None and not door.bypassed and not door.hidden and door not in stack():
        return True
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)
    return bool(below) and not torch.is_inference_mode_enabled()


def _forgets(frame: FrameType | None) -> bool:
    """Whether Python prints and forgets what is raised in `frame`: a finalizer, or what the collector calls."""
    codes = {getattr(c, "__code__", None) or getattr(type(c).__call__, "__code__", None) for c in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in codes or code.co_name == "__del__" or code.co_filename in _REFERENCES:
            return True
        frame = frame.f_back
    return False


_STANDING_IN = tuple(str(module.__file__) for module in (composites, guards, readers, tracers))


@functools.cache
def _is_ours(file: str) -> bool | None:
    """Whether code is the runtime's or the program's; None where it works for either: what called it says for whom."""
    if file in _STANDING_IN or file.startswith((*_LIBRARIES, "<frozen ")):
        return None
    if file.startswith(_STANDARD) and not any(folder in file for folder in _INSTALLED):
        return None
    return file.startswith(FOLDER) and file != _LAUNCHER


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether the runtime compiles, or waits for that, and no region of a flush has run."""
    codes: set[CodeType] = set()
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    return not codes.isdisjoint(_WAITS) and Execution.advance.__code__ not in codes


def hold() -> None:
    """A context of this thread opens."""
    global _contexts, _set, _get
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"):
        return
    _contexts += 1
    if _contexts == 1:
        _set, _get = signal.signal, signal.getsignal  # somebody else may have replaced them
        _replace(_signal_of_the_program, _handler_of_the_program)
        handlers = zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True)
        for number, handler in [each for each in handlers if each[1]]:  # most are 0: a context may be entered in a loop
            if callable(handler):
                _later[number] = later = Later(handler)
                _signal.signal(number, later)


def release() -> None:
    """A context of this thread has closed. Handlers that are still to be told of a signal are called.

    Raises:
        BaseException: what a handler does, as `KeyboardInterrupt`.
    """
    global _contexts
    if threading.current_thread() is not threading.main_thread() or not _contexts:
        return
    _contexts -= 1
    if _contexts:
        return
    if signal.signal is _signal_of_the_program:
        _replace(_set, _get)
    waiting: list[int] = []
    while _later:
        number, later = _later.popitem()
        if _signal.getsignal(number) is later:
            _signal.signal(number, later.handler)
        if later.since:
            later.since = 0.0
            waiting.append(number)
    for number in waiting:
        signal.raise_signal(number)


def _replace(set_handler: Callable[..., Any], get_handler: Callable[..., Any]) -> None:
    signal.signal, signal.getsignal = set_handler, get_handler


def _signal_of_the_program(number: int, handler: Any) -> Any:
    """`signal.signal` while a context is open."""
    later = Later(handler) if callable(handler) else None
    before = _set(number, handler if later is None else later)
    _later.pop(int(number), None)
    if later is not None:
        _later[int(number)] = later
    return before.handler if isinstance(before, Later) else before


def _handler_of_the_program(number: int) -> Any:
    """`signal.getsignal` while a context is open."""
    found = _get(number)
    return found.handler if isinstance(found, Later) else found
