"""Profilers: where one starts and stops, and what the front door does meanwhile.

What observes a part of the program should see what that part computes: where it starts, and again where it stops, all
pending work is finished. In between each op goes by way of Python, what the library does for itself is hidden
(`profiled`), and where operands are looked at, pending storages are labelled and not trapped (`devices.host.trap`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.profiler
import torch.autograd.profiler_legacy
import torch.profiler.profiler

from ... import follower, profiled
from ...devices.host import trap
from ...executing import run
from ...executing.materialize import materialize_all
from ...log.reasons import Reason

_running: set[str] = set()
# An execution trace that is asked for the values of integers reads memory: it finds the trap, and says so.
_READ_VALUES = tuple(f"ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_{what}" for what in ("DATA", "RANGE"))


def _observe(what: str, starts: bool) -> None:
    (_running.add if starts else _running.discard)(what)
    profiled.on = bool(_running)
    trap.label(profiled.on and not any(os.environ.get(name, "0") == "1" for name in _READ_VALUES))
    follower.pause(profiled.on)


def _starting(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            was = what in _running
            _observe(what, True)  # before: what another thread makes pending meanwhile is labelled
            try:
                materialize_all(Reason("cut.profiler", f"{what} starts"))
                return original(*args, **kwargs)
            except BaseException:
                _observe(what, was)
                raise

        return start

    return make


def _stopping(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stop(*args: Any, **kwargs: Any) -> Any:
            try:
                materialize_all(Reason("cut.profiler", f"{what} stops"))
            except Exception as error:
                # The profiler has to be stopped, and its caller wants what it has seen: told at the next sync.
                run.DEFERRED.owed.append((threading.get_ident(), error))
            try:
                return original(*args, **kwargs)
            finally:
                _observe(what, False)

        return stop

    return make


def rows() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What is patched while a context is open: owner, name, and what makes the patch."""
    kineto, legacy, trace = torch.autograd.profiler, torch.autograd.profiler_legacy, torch.profiler.profiler
    for owner, what, start, stop in (
        (kineto, "the profiler", "_enable_profiler", "_disable_profiler"),
        (legacy, "the legacy profiler", "_enable_profiler_legacy", "_disable_profiler_legacy"),
        (trace, "an execution trace", "_enable_execution_trace_observer", "_disable_execution_trace_observer"),
    ):
        if hasattr(owner, start) and hasattr(owner, stop):
            yield owner, start, _starting(what)
            yield owner, stop, _stopping(what)


def look() -> None:
    """A context is entered: one may be running since before."""
    if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        _observe("the profiler", True)


def forget() -> None:
    """The last context closes: nothing is pending, and nothing is ours any more."""
    for what in list(_running):
        _observe(what, False)
