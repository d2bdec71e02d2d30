"""Forms: what a graph is called with, as far as its program depends on it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fused_eager.fusion_rules import precision

from .values import is_static

Tensor = torch.Tensor
Form = tuple[Hashable, ...]
_switches = precision.switches


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
        self.fixed: list[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = []
        self.free: list[int] = []
        for at, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            val = node.meta.get("val")
            plain = isinstance(val, Tensor) and val.layout is torch.strided and is_static(val)
            if plain and not (val.is_conj() or val.is_neg()):
                self.fixed.append((at, torch.Size(val.shape), tuple(val.stride()), val.dtype))
            else:
                self.free.append(at)

    def key(self, args: Sequence[Any]) -> Form:
        """The same for arguments of one form, and for no others."""
        for at, size, strides, dtype in self.fixed:
            t = args[at]
            if type(t) is not Tensor and not isinstance(t, Tensor):
                return form_of(args)
            if t.dtype is not dtype or t.shape != size or t.layout is not _STRIDED or t.stride() != strides:
                return form_of(args)
            if t.is_neg() or t.is_conj():
                return form_of(args)
        return (_switches(), *[_form(args[at]) for at in self.free])


_STRIDED = torch.strided
