"""Flex attention: the call of a graph that holds two more, one that changes a score and one that says which are seen,
as the ops that torch computes it with where it has no kernel for it.

The two graphs are about single numbers, and torch maps them over batch, heads, queries and keys. What comes of that are
ops as any others: recorded, checked (an index that a value decides is one), fused with what stands around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import _trace_wrapped_higher_order_op  # noqa: F401 - has `_SCATTER`
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
    sdpa_dense,
    sdpa_dense_backward,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .templates import mapped

Tensor = torch.Tensor

_DENSE: dict[Any, Callable[..., Any]] = {flex_attention: sdpa_dense, flex_attention_backward: sdpa_dense_backward}
_SCATTER = torch.ops.flex_lib.zeros_and_scatter.default  # the gradient of what a score reads at an index


def _scattered(shape: list[int], indices: list[Tensor], values: Tensor) -> Tensor:
    return torch.ops.aten.index_put(values.new_zeros(shape), indices, values, accumulate=True)


_READ = 12  # the argument of the derivative that has what a score reads beside its place


def is_flex(target: Any) -> bool:
    """Whether a call is flex attention, or its derivative."""
    return target in _DENSE


def decomposed(target: Any, node: Node, args: Any, kwargs: Any) -> tuple[GraphModule, list[Tensor]] | str:
    """The ops of such a call, as a graph, and the tensors that it takes; else why torch has to run it."""
    given: list[Tensor] = []

    def place(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        given.append(a)
        return _Place(len(given) - 1)

    form = mapped(place, [list(args), kwargs])
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in given]

    if target is flex_attention_backward:
        # Torch computes the gradients of those that need one, which nothing says of what stands for them here.
        for a in mapped(lambda a: fakes[a.at] if isinstance(a, _Place) else a, form)[0][_READ]:
            if isinstance(a, Tensor) and a.is_floating_point():
                a.requires_grad_()

    def dense(*tensors: Tensor) -> Any:
        positional, named = mapped(lambda a: tensors[a.at] if isinstance(a, _Place) else a, form)
        return _DENSE[target](*positional, **named)

    try:
        with torch.no_grad():
            graph = make_fx(dense, {_SCATTER: _scattered}, _allow_non_fake_inputs=True)(*fakes)
    except Exception as error:
        return f"it cannot be taken apart: {str(error).partition(chr(10))[0][:200]}"
    about = {name: value for name, value in node.meta.items() if name != "val"}
    for inner in graph.graph.nodes:
        inner.meta.update(about)  # whose line it is
    return graph, given


class _Place:
    """Where a tensor stands among arguments."""

    def __init__(self, at: int):
        self.at = at
