"""Torch's profiler sees what the program calls, and nothing of what the library does for itself.

Torch tells its observers (the profiler, ITT and NVTX, the execution trace) of each op where it enters the dispatcher,
long before a dispatch mode sees it. So the program's ops are told of by torch itself, with their shapes, sequence
numbers and stacks. What the library calls on the way, shape inference, rehearsals, the op itself in its native form,
would be told of as well, and is `hidden`; where ATen runs an op at once, what its kernel calls is `shown`.

The same holds for the frames of Python that the profiler follows with `with_stack`: it is an interpreter's hook, which
hidden code suspends. (Python 3.10 has no such call; there they are seen.)
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import threading
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from fused_eager.fusion_rules.lowering import leaves

on = False  # whether anything observes: one module attribute, because each op asks
_record = torch._C._autograd._enable_record_function  # of this thread
_CPU = DispatchKeySet(DispatchKey.CPU)


class _Thread(threading.local):
    is_hidden = False
    is_suspended = False  # torch's hook, for Python's frames


_thread = _Thread()
_HOOK = "TraceContext"  # the type of what torch's hook is set with: other profilers of Python go on


def _of_the_interpreter(name: str, *types: Any) -> Any:
    """A function of Python's C API; None where it has none of this name."""
    return ctypes.PYFUNCTYPE(*types)((name, ctypes.pythonapi)) if hasattr(ctypes.pythonapi, name) else None


_state = _of_the_interpreter("PyThreadState_Get", ctypes.c_void_p)
_suspend = _of_the_interpreter("PyThreadState_EnterTracing", None, ctypes.c_void_p)
_resume = _of_the_interpreter("PyThreadState_LeaveTracing", None, ctypes.c_void_p)


class _Seen:
    """What the body calls is told to observers, or is not.

    The hook is suspended and resumed in these two methods and not in what they call: it sees one of them begin and the
    other end, and takes them for one frame, in which the body's time passed.
    """

    __slots__ = ("before", "turns")
    hides: bool

    def __enter__(self) -> None:
        self.before, self.turns = _thread.is_hidden, False
        if self.before is self.hides:
            return
        _thread.is_hidden = self.hides
        _record(not self.hides)
        if self.hides:
            if _suspend is not None and type(sys.getprofile()).__name__ == _HOOK:
                self.turns = _thread.is_suspended = True
                _suspend(_state())
        elif _thread.is_suspended:
            self.turns, _thread.is_suspended = True, False
            _resume(_state())

    def __exit__(self, *error: Any) -> None:
        if self.before is self.hides:
            return
        _thread.is_hidden = self.before
        _record(not self.before)
        if self.turns:
            _thread.is_suspended = not self.hides
            (_resume if self.hides else _suspend)(_state())


class hidden(_Seen):
    """No observer is told of what the body calls: the library's own work."""

    __slots__ = ()
    hides = True


class shown(_Seen):
    """Inside `hidden`, observers are told again: of what the program's own op calls."""

    __slots__ = ()
    hides = False


def is_hidden() -> bool:
    """Whether this thread is in code that observers are told nothing of."""
    return _thread.is_hidden


def through(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that observers have been told of, so that they see what its kernel calls, and not the op a second
    time."""
    if isinstance(op, OpOverload) and _next_key(op, args, kwargs) == DispatchKey.CPU and _is_exact(op, args):
        with shown():
            return op.redispatch(_CPU, *args, **kwargs)  # which enters the kernel without telling anybody
    return op(*args, **kwargs)


def _is_exact(op: OpOverload, args: Any) -> bool:
    """Whether no number stands for a tensor: those are converted where a call enters the dispatcher."""
    positions = _tensors(op)
    return not any(i in positions and isinstance(a, (bool, int, float, complex)) for i, a in enumerate(args))


@functools.cache
def _tensors(op: OpOverload) -> frozenset[int]:
    return frozenset(i for i, a in enumerate(op._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]"))


def _next_key(op: OpOverload, args: Any, kwargs: Any) -> DispatchKey:
    """The dispatch key whose kernel a call would enter next."""
    tensors = [t for t in leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
    if not tensors:
        device = kwargs.get("device")
        return DispatchKey.CPU if device is None or torch.device(device).type == "cpu" else DispatchKey.Undefined
    keys = torch._C._dispatch_tls_local_include_set()
    for t in tensors:
        keys = keys | torch._C._dispatch_keys(t)
    return (keys - torch._C._dispatch_tls_local_exclude_set() - _passed(op)).highestPriorityTypeId()


@functools.cache
def _passed(op: OpOverload) -> DispatchKeySet:
    """The keys that are switched on for all calls of a thread, and have no kernel for an op."""
    passed = [DispatchKeySet(key).raw_repr() for key in _PASSING if not _has_kernel(op, key)]
    return DispatchKeySet.from_raw_repr(functools.reduce(operator.or_, passed, 0))


_PASSING = (DispatchKey.BackendSelect, DispatchKey.AutocastCPU, DispatchKey.ADInplaceOrView)


def _has_kernel(op: OpOverload, key: DispatchKey) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
