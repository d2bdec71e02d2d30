"""Collecting: finalizers of the program's see our mode wherever Python's cyclic garbage collector runs them.

What an op does here it does with the collector held off. But torch takes our mode off its stack before it calls
`__torch_dispatch__`, and makes objects for that: Python may collect there, and from 3.12 on where a function begins,
too. For the length of such a collection the mode is put back, and with it what torch has switched off below it. (Where
there is a compiled follower it holds the collector off before all that, and lets a collection that is due come first.)
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from ... import quiet
from .threads import current_door


class _Collection(threading.local):
    """The one that is under way in a thread, if the mode was put back for it."""

    put_back: ExitStack | None = None


_COLLECTION = _Collection()


def _around(phase: str, info: dict[str, Any]) -> None:
    if phase == "start":
        door = current_door()
        if door is None or door.bypassed or door.hidden or not gc.isenabled() or door in quiet.stack():
            return
        _COLLECTION.put_back = stack = ExitStack()
        with suppress(RuntimeError):  # there is none where it was not torch's dispatcher that took the mode off
            stack.enter_context(torch._C._RestorePythonTLSSnapshot())  # type: ignore[attr-defined]
        quiet.restack([*quiet.stack(), door])
        stack.callback(lambda: quiet.restack([mode for mode in quiet.stack() if mode is not door]))
    elif _COLLECTION.put_back is not None:
        stack, _COLLECTION.put_back = _COLLECTION.put_back, None
        stack.close()


def watch() -> Callable[[], None]:
    """Begin to look after collections; returns what ends that."""
    gc.callbacks.append(_around)
    return lambda: gc.callbacks.remove(_around)
