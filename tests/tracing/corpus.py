"""Ops of the corpus, forward and backward, of each of whose calls something is asked before it is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from fused_eager.fusion_rules.lowering import leaves
from torch.utils._python_dispatch import TorchDispatchMode

from fused_eager.tracing.opinfo import Kind, info_of


class Asking(TorchDispatchMode):
    """Asks of each call in two ways; `asked` counts those that both know, `differing` says how they differ. (It raises
    nothing: what torch refuses is passed over, and whatever is raised beside it would be as well.)"""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.differing: list[str] = []

    def ask(self, op: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Compare two answers of a call of plain tensors."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
        plain = all(type(t) is torch.Tensor and t.layout == torch.strided for t in tensors)
        if plain and info_of(func).kind is Kind.COMPUTE:
            self.ask(func, args, kwargs, tensors)
        return func(*args, **kwargs)


def run(asking: Asking, samples: Iterable[tuple[Any, Any]]) -> None:
    """Make the calls of these samples of ops."""
    for info, sample in samples:
        with asking:
            try:
                out = info.op(sample.input, *sample.args, **sample.kwargs)
                ends = [t for t in leaves([out]) if isinstance(t, torch.Tensor) and t.requires_grad]
                inputs = [t for t in leaves([sample.input, sample.args]) if isinstance(t, torch.Tensor)]
                inputs = [t for t in inputs if t.requires_grad]
                if ends and inputs:
                    torch.autograd.grad([t.sum() for t in ends], inputs, allow_unused=True)
            except (RuntimeError, AssertionError):
                pass  # what torch refuses here is no matter of what is returned
