"""Snapshots: what torch notes of a thread before it asks a mode, for kernels that stand where torch would note it.

Torch's own kernel of the first dispatch key notes the thread's dispatch keys, and torch 2.11 takes a call to no mode or
subclass without that note. A kernel of ours under that key replaces torch's. So it hands the rest of the call to an op
that has no such kernel: torch's own is called for it, and calls ours right below.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

KEY = "PythonTLSSnapshot"
FIRST = DispatchKeySet(getattr(DispatchKey, KEY))
MODES = FIRST | DispatchKeySet(DispatchKey.Python)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []  # a stack: a signal's handler may call one between two lines


_thread = _Thread()
_library = torch.library.Library("fused_eager", "FRAGMENT")
_library.define("below_snapshot(Tensor[] given) -> ()")
# Torch finds a subclass by a tensor that is given. What a kernel for this key returns has passed no other key.
_library.impl("below_snapshot", lambda given: _thread.calls[-1](), "Python")
_op: OpOverload = torch.ops.fused_eager.below_snapshot.default


def redispatch(op: OpOverload, keys: DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op returns whose kernel under the first key is ours, from the next of `keys` on.

    Raises:
        Exception: what the op, the mode or the subclass raises.
    """
    below = keys - FIRST
    if not below.has(DispatchKey.Python):
        return op.redispatch(below, *args, **kwargs)
    out: list[Any] = []
    _thread.calls.append(lambda: out.append(op.redispatch(below, *args, **kwargs)))
    try:
        _op.redispatch(MODES, [a for a in args if isinstance(a, torch.Tensor)])
    finally:
        _thread.calls.pop()
    return out[0]
