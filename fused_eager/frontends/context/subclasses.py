"""Tensors of classes of the program's: which of their functions torch would call, and what these may look at."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _has_torch_function as _has_function
from torch._subclasses.fake_tensor import FakeTensor

from fused_eager.fusion_rules.lowering import leaves

from ...devices.host.buffers import TABLE, buffer_of
from ...devices.storage import has_memory
from ...executing.materialize import materialize
from ...log.reasons import Reason

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_plain_types: dict[type, bool] = {torch.Tensor: True, torch.nn.Parameter: True}


def is_plain(kind: type) -> bool:
    """Whether tensors of this type behave below autograd like torch.Tensor: no `__torch_dispatch__` of their own."""
    found = _plain_types.get(kind)
    if found is None:
        found = _plain_types[kind] = kind.__torch_dispatch__ is _PLAIN_DISPATCH  # type: ignore[attr-defined]
    return found


def asks_functions(args: Any, kwargs: Any) -> bool:
    """Whether looking at an argument would call the `__torch_function__` of a subclass. Where that has been called it
    is switched off, most often; in an autograd node it is not, nor by `torch.overrides.redispatch_function`.
    """
    if _has_function(args) or (kwargs and _has_function(tuple(kwargs.values()))):
        return True
    return any(_has_function(a) for a in args if type(a) is list)


def leave_to(args: Any, kwargs: Any) -> None:
    """Before a `__torch_dispatch__` of the program's gets an op: what it does with memory of its own tensors, below all
    modes, nobody sees. The plain tensors that come with them take part in it. A wrapper has no memory, and calls ops
    on what it wraps: those come here in their turn.
    """
    if not TABLE:
        return
    tensors = [t for t in leaves([args, kwargs or {}]) if isinstance(t, torch.Tensor) and type(t) is not FakeTensor]
    own = next((t for t in tensors if not is_plain(type(t)) and has_memory(t)), None)
    if own is None:
        return
    for t in tensors:
        b = buffer_of(t) if has_memory(t) else None
        if b is not None:
            materialize(b, Reason("sync.memory", f"{type(own).__name__}.__torch_dispatch__"))
