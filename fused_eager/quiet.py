"""Running torch without being seen: no dispatch mode and no autograd looks at what the runtime does for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unobserved() -> Iterator[None]:
    """No dispatch mode is active in the body, and nothing is recorded for autograd.

    Not `_DisableTorchDispatch`: the lowering of a decomposition needs a mode of its own inside.
    """
    with torch.no_grad():
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                yield
        else:
            yield
