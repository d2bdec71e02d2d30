"""Running torch without being seen: no dispatch mode and no autograd looks at what the runtime does for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

_thread = threading.local()


def inside() -> bool:
    """Whether this thread is in the runtime's own code: JAX starts threads there, and nothing has to be settled."""
    return getattr(_thread, "depth", 0) > 0


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
