"""Forms: what a graph is called with, as far as its program depends on it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.fx import GraphModule

from fused_eager.fusion_rules import precision

from .values import is_static

Tensor = torch.Tensor
Form = tuple[Hashable, ...]
_switches = precision.switches
GUARDS = 8  # times, at most, that torch is told what to check: it is no gain where the program keeps changing


def form_of(args: Sequence[Any]) -> Form:
    """All that a program depends on: torch's switches, and each argument's number, or sizes, strides and dtype."""
    return (_switches(), *map(_form, args))


def _form(a: Any) -> Hashable:
    if isinstance(a, Tensor):
        try:
            return a.shape, a.stride(), a.dtype, a.is_conj(), a.is_neg()
        except RuntimeError:  # a sparse one has no strides
            return a.shape, a.layout, a.dtype
    return type(a), a


def changes(before: Form, now: Form) -> list[list[str]]:
    """In what a form differs from the one before, in words: at most 20 of them."""
    words = ["torch's switches for products", *(f"argument {at}" for at in range(len(now) - 1))]
    return [[what, str(a), str(b)] for what, a, b in zip(words, before, now, strict=False) if a != b][:20]


class Forms:
    """The forms of one graph: `key` tells them apart in less time than `form_of`, for most arguments are what the graph
    says of them."""

    def __init__(self, graph: GraphModule):
        self._guards: TensorGuards | None = None  # torch's own check of tensors that are what the graph says of them
        self._guards_made = 0
        self.fixed: list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = []
        self.free: list[int] = []
        for at, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            val = node.meta.get("val")
            plain = isinstance(val, Tensor) and val.layout is torch.strided and is_static(val)
            if plain and not (val.is_conj() or val.is_neg()):
                self.fixed.append((at, torch.Size(val.shape), tuple(val.stride()), val.dtype))
            else:
                self.free.append(at)
        self._positions = [at for at, *_ in self.fixed]

    def key(self, args: Sequence[Any]) -> Form:
        """The same for arguments of one form, and for no others."""
        known = [args[at] for at in self._positions]
        if self._guards is None or not self._guards.check(*known):
            if not self._are_fixed(args):
                return form_of(args)
            self._guard(known)
        return (_switches(), *[_form(args[at]) for at in self.free]) if self.free else (_switches(),)

    def _guard(self, known: Sequence[Tensor]) -> None:
        """Have torch check such tensors from now on, in a tenth of the time. It knows no others than these, neither
        with gradients where these have none nor in another mode of autocast; then they are looked at one by one."""
        if self._guards_made == GUARDS:
            self._guards = None
            return
        self._guards_made += 1
        sizes: Any = [list(t.shape) for t in known]
        strides: Any = [list(t.stride()) for t in known]
        self._guards = TensorGuards(*known, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def _are_fixed(self, args: Sequence[Any]) -> bool:
        """Whether the arguments that the graph says all of are like that."""
        for at, size, strides, dtype in self.fixed:
            t = args[at]
            if type(t) is not Tensor and not isinstance(t, Tensor):
                return False
            if t.dtype is not dtype or t.shape != size or t.layout is not _STRIDED or t.stride() != strides:
                return False
            if t.is_neg() or t.is_conj():
                return False
        return True


_STRIDED = torch.strided
