"""The outermost module: being told of its calls, at no price for the modules inside it.

A forward hook for all modules costs each of them 2 us a call: a tenth of the time in which a small model generates a
token. A hook of one module would be copied and saved with it. So the first call is found by a hook for all; from then
on the class of that module has a `__call__` that tells, for as long as anybody listens.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

_LOCK = threading.RLock()  # a module may die, and tell, in any line
_LISTENING: dict[type[Module], _Telling] = {}


class Calls:
    """Tells of each call, in this thread, of the module that this thread calls first from now on.

    `told` returns whether it wants to hear of the next one.
    """

    def __init__(self, told: Callable[[], bool]):
        self._told = told
        self._thread = threading.get_ident()
        self._begin()

    def _begin(self, dead: object = None) -> None:
        self._outermost: weakref.ref[Module] | None = None
        self._hook = register_module_forward_pre_hook(self._hear)
        _unlisten(self)

    def _hear(self, module: Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            if self._outermost is None:
                self._outermost = weakref.ref(module, self._begin)
                if _listen(type(module), self):
                    self._hook.remove()
            self.called(module)

    def called(self, module: Module) -> None:
        """A module is called, which may be the one."""
        outermost = self._outermost
        if outermost is None or outermost() is not module or threading.get_ident() != self._thread:
            return
        if not self._told():
            self.forget()

    def forget(self) -> None:
        """Listen no more."""
        self._outermost = None
        self._hook.remove()
        _unlisten(self)


class _Telling:
    """A class of modules whose calls are told of. Raises TypeError where its `__call__` is more than a function."""

    def __init__(self, kind: type[Module]):
        self.kind = kind
        self.listeners: list[Calls] = []
        self.own = own = vars(kind).get("__call__")
        if not isinstance(own, types.FunctionType | None):
            raise TypeError(f"{kind.__name__}.__call__ is a {type(own).__name__}")
        parent: Any = super

        @functools.wraps(kind.__call__)
        def __call__(module: Module, *args: Any, **kwargs: Any) -> Any:
            for each in tuple(self.listeners):
                each.called(module)
            # What the class inherits is looked up each time: tracers replace that of all modules.
            return own(module, *args, **kwargs) if own else parent(kind, module).__call__(*args, **kwargs)

        self.call = kind.__call__ = __call__  # type: ignore[method-assign]

    def end(self) -> None:
        """As it was; where somebody has put another `__call__` in its place, this one stays below it and is silent."""
        if vars(self.kind).get("__call__") is self.call:
            if self.own is None:
                del self.kind.__call__
            else:
                self.kind.__call__ = self.own  # type: ignore[method-assign]


def _listen(kind: type[Module], calls: Calls) -> bool:
    """Have `calls` told of the calls of all modules of a class, if that can be."""
    with _LOCK:
        if kind not in _LISTENING:
            try:
                _LISTENING[kind] = _Telling(kind)
            except TypeError:  # also of a class that cannot be changed
                return False
        _LISTENING[kind].listeners.append(calls)
        return True


def _unlisten(calls: Calls) -> None:
    with _LOCK:
        for kind, telling in list(_LISTENING.items()):
            if calls in telling.listeners:
                telling.listeners.remove(calls)
                if not telling.listeners:
                    del _LISTENING[kind]
                    telling.end()
