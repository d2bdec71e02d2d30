"""Levels: whether forward derivatives are being computed anywhere in the process.

`torch.autograd.forward_ad` counts the levels that it opens. A graph of Dynamo's opens them below that count, while it
is traced and where the backend "eager" runs it. These go through two functions of torch's, whose calls are counted
here; torch 2.11 has none of them, and its graphs no such derivatives of an own op.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._functorch import predispatch
from torch.autograd import forward_ad

_open = 0


def are_open() -> bool:
    """Whether some tensor may have a tangent."""
    return _open > 0 or forward_ad._current_level >= 0


def primal_of(t: torch.Tensor) -> torch.Tensor:
    """A tensor without its tangent. There is one level at most, number 0: torch has no nested ones."""
    primal: torch.Tensor = torch._VF._unpack_dual(t, level=0)[0]
    return primal


def _counted(function: Any, step: int) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _open
        result = function(*args, **kwargs)
        _open = max(0, _open + step)
        return result

    return call


for _name, _step in (("_enter_dual_level_impl", 1), ("_exit_dual_level_impl", -1)):
    if hasattr(predispatch, _name):
        setattr(predispatch, _name, _counted(getattr(predispatch, _name), _step))
