"""Running torch without being seen: no dispatch mode and no autograd looks at what the runtime does for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode

_thread = threading.local()


OWN = "fused-eager"  # the names of the library's own threads begin so


def inside() -> bool:
    """Whether this thread is in the runtime's own code: it starts threads there, and nothing has to be settled."""
    if getattr(_thread, "depth", 0) > 0:
        return True
    thread = threading.current_thread()
    return thread.name.startswith(OWN) or hasattr(thread, "_fused_eager")


def adopt(thread: threading.Thread) -> None:
    """Take a thread for one of the runtime's own, as those are that the library of a remote store starts."""
    thread._fused_eager = True  # type: ignore[attr-defined]


@contextmanager
def unobserved() -> Iterator[None]:
    """No dispatch mode is active in the body, and nothing is recorded for autograd.

    Not `_DisableTorchDispatch`: the lowering of a decomposition needs a mode of its own inside.
    """
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        with torch.no_grad(), torch._C._DisableAutocast():
            if torch._C._len_torch_dispatch_stack():
                with _disable_current_modes():
                    yield
            else:
                yield
    finally:
        _thread.depth -= 1


@contextmanager
def without(mode: TorchDispatchMode) -> Iterator[None]:
    """`mode`, wherever it is on this thread's stack of modes, does not see what the body runs; the others do.

    Not `_DisableTorchDispatch`: torch's printing holds a guard in its frame that restores the thread's dispatch keys
    when the frame goes. After an exception that is late, and would switch off every later mode of the thread.
    """
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
    for other in modes:
        if other is not mode:
            _push_mode(other)
    try:
        yield
    finally:
        while torch._C._len_torch_dispatch_stack():
            _pop_mode()
        for each in modes:
            _push_mode(each)
