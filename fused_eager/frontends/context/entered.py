"""Entered: what torch notes of modes for the whole process, while one of ours is entered in any thread.

`TorchDispatchMode` keeps in each mode what the notes said when it came, and writes that back when it goes. Two threads
whose contexts overlap, the first to enter being the first to leave, then note for good that there is a mode: a torch
whose Dynamo asks the note compiles nothing any more. So they are counted here, and what the first of ours found is
written back when the last of them goes.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import quiet

try:
    from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals as _note_for_thread
except ImportError:  # not in each torch
    _note_for_thread = None  # type: ignore[assignment]

_IGNORES = "_is_in_any_mode_without_ignore_compile_internals"
NOTES = tuple(
    name
    for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode", _IGNORES)
    if hasattr(_python_dispatch, name)
)
_lock = threading.Lock()
_inside: WeakKeyDictionary[TorchDispatchMode, int] = WeakKeyDictionary()  # our modes, and the thread of each
_before: dict[str, bool] = {}  # the notes, as the first of them found them


def enters(mode: TorchDispatchMode) -> None:
    """One of our modes is about to be entered in this thread."""
    with _lock:
        if not _inside:
            _before.update((name, getattr(_python_dispatch, name)) for name in NOTES)
        _inside[mode] = threading.get_ident()


def has_left(mode: TorchDispatchMode) -> None:
    """It is off this thread's stack for good, and torch has written its notes."""
    with _lock:
        _inside.pop(mode, None)
        _write()
    if _note_for_thread is not None:
        _note_for_thread(any(not each.ignore_compile_internals() for each in quiet.stack()))


def _write() -> None:
    for name in NOTES:
        setattr(_python_dispatch, name, bool(_inside) or _before[name])


def _in_child() -> None:
    """A forked child has one thread: what others had entered nobody leaves."""
    global _lock
    _lock = threading.Lock()
    here = threading.get_ident()
    for mode, thread in list(_inside.items()):
        if thread != here:
            del _inside[mode]
    if _before:
        _write()


os.register_at_fork(after_in_child=_in_child)
