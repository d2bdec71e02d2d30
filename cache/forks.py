"""What a forked child must rebuild: locks, threads and connections of the parent are of no use to it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_hooks: list[weakref.WeakMethod[Callable[[], Any]]] = []


def call_after_fork(method: Callable[[], Any]) -> None:
    """Calls the bound method in every forked child while its object lives; os.register_at_fork has no undo."""
    _hooks[:] = [hook for hook in _hooks if hook() is not None]
    _hooks.append(weakref.WeakMethod(method))


def _in_child() -> None:
    for hook in _hooks:
        method = hook()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
