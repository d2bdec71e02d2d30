"""Profilers: where one starts and stops, and what the front door does meanwhile.

What observes a part of the program should see what that part computes: where it starts, and again where it stops, all
pending work is finished. In between, what the library does for itself is hidden (`profiled`). In a context each op goes
by way of Python then, and where operands are looked at, pending storages are labelled and not trapped
(`devices.host.trap`). A device's ops go on in C++, which calls nothing that an observer is told of.
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
from torch._C import DispatchKeySet
from torch._ops import OpOverload

from fused_eager.fusion_rules import families

from ... import follower, profiled, xla
from ...devices.host import trap
from ...executing import run
from ...executing.materialize import materialize_all
from ...log.reasons import Reason
from ...quiet import stack, unobserved
from . import snapshot
from .threads import current_door

_running: set[str] = set()
# An execution trace that is asked for the values of integers reads memory: it finds the trap, and says so.
_READ_VALUES = tuple(f"ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_{what}" for what in ("DATA", "RANGE"))
# What `record_function` calls. A mode would be told of it, and torch would show that as an event of its own.
MARKS = "_record_function_enter_new.default", "_record_function_exit._RecordFunction"
_imports = True  # not in a forked child, where nothing is compiled
_context_is_open = _has_device = False


def _observe(what: str, starts: bool) -> None:
    (_running.add if starts else _running.discard)(what)
    _heed()


def _heed() -> None:
    profiled.on = bool(_running)
    trap.label(profiled.on and not any(os.environ.get(name, "0") == "1" for name in _READ_VALUES))
    follower.pause(profiled.on and _context_is_open)


@functools.cache
def _import_all() -> None:
    """Have what compiling needs imported. With `with_stack`, torch's profiler knows the code of a frame by its address:
    a module's is freed once the module has been imported, and reading its name raises then."""
    families.load()
    with unobserved():
        xla.lower_once()


def _starting(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            was = what in _running
            if _imports and (_has_device or current_door() is not None):
                _import_all()
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
    """What is patched while a context is open, or there is a device: owner, name, and what makes the patch."""
    kineto, legacy, trace = torch.autograd.profiler, torch.autograd.profiler_legacy, torch.profiler.profiler
    for owner, what, start, stop in (
        (kineto, "the profiler", "_enable_profiler", "_disable_profiler"),
        (legacy, "the legacy profiler", "_enable_profiler_legacy", "_disable_profiler_legacy"),
        (trace, "an execution trace", "_enable_execution_trace_observer", "_disable_execution_trace_observer"),
    ):
        if hasattr(owner, start) and hasattr(owner, stop):
            yield owner, start, _starting(what)
            yield owner, stop, _stopping(what)


def _mark(op: OpOverload) -> Callable[..., Any]:
    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        door = current_door()
        ours = door is not None and stack() == [door]
        return snapshot.redispatch(op, keys - snapshot.MODES if ours else keys, args, kwargs)

    return kernel


def meet_marks() -> Callable[[], None]:
    """Have `record_function` pass by our mode, for as long as a context is open; returns what ends it."""
    library = torch.library.Library("profiler", "IMPL")
    for name in MARKS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.profiler, packet), overload)
        library.impl(op, _mark(op), snapshot.KEY, with_keyset=True)
    return library._destroy


def _in_child() -> None:
    global _imports
    _imports = False


os.register_at_fork(after_in_child=_in_child)


def look() -> None:
    """A context is entered: one may be running since before."""
    global _context_is_open
    _context_is_open = True
    if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        _running.add("the profiler")
    _heed()


def forget() -> None:
    """The last context closes: nothing of the host's is pending, and without a device nothing is ours any more."""
    global _context_is_open
    _context_is_open = False
    if not _has_device:
        _running.clear()
    _heed()


def watch() -> None:
    """The process has a device, to its end."""
    global _has_device
    _has_device = True
    for owner, name, make in rows():
        setattr(owner, name, make(getattr(owner, name)))
    if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        _observe("the profiler", True)
