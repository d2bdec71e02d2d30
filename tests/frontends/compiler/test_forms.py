"""Forms of arguments: those of one form have one key, and others another, whoever checks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from fused_eager.devices.host.device import HOST
from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.frontends.compiler.forms import Forms, form_of

Tensor = torch.Tensor
C = torch.complex64
# What is called with instead of a contiguous [4, 4] of float32.
OTHERS: dict[str, Callable[[], Any]] = {
    "size": lambda: torch.randn(4, 5),
    "fewer_dimensions": lambda: torch.randn(16),
    "strides": lambda: torch.randn(4, 4).t(),
    "strides_of_a_part": lambda: torch.randn(4, 8)[:, :4],
    "dtype": lambda: torch.zeros(4, 4, dtype=torch.int32),
    "negative": lambda: torch.zeros(4, 4, dtype=C).conj().imag.mul(1)._neg_view(),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "number": lambda: 4,
    "nothing": lambda: None,
}  # fmt: skip
SAME: dict[str, Callable[[], Any]] = {
    "another": lambda: torch.randn(4, 4),
    "parameter": lambda: torch.nn.Parameter(torch.randn(4, 4)),
    "with_gradients": lambda: torch.randn(4, 4).requires_grad_(),
    "part": lambda: torch.randn(8, 4)[4:],
}


def forms() -> Forms:
    graph = Graph()
    for name in ("x", "y"):
        graph.placeholder(name).meta["val"] = torch.empty(4, 4)
    graph.output(())
    return Forms(GraphModule({}, graph))


@pytest.mark.parametrize("name", OTHERS)
def test_another_form_has_another_key(name: str) -> None:
    known, x = forms(), torch.randn(4, 4)
    key = known.key([x, x])
    for args in ([x, OTHERS[name]()], [OTHERS[name](), x]):
        for _ in range(3):
            assert known.key(args) == form_of(args) != key
            assert known.key([x, x]) == key


@pytest.mark.parametrize("name", SAME)
def test_the_same_form_has_the_same_key(name: str) -> None:
    known, x = forms(), torch.randn(4, 4)
    key = known.key([x, x])
    for at in range(20):  # more often than torch is told what to check
        assert known.key([x, SAME[name]()] if at % 2 else [x, x]) == key


def test_an_argument_that_is_changed_in_place_is_another() -> None:
    x = torch.randn(4, 4)
    known = forms()
    key = known.key([x, x])
    for change in (lambda: x.t_(), lambda: x.resize_(2, 8), lambda: setattr(x, "data", torch.randn(4, 4).t())):
        change()
        assert known.key([x, x]) == form_of([x, x]) != key


def test_weights_that_move_or_are_not_aligned_are_read_anew() -> None:
    """Arrays over memory are kept from call to call: neither what moved is read where it was, nor a copy that XLA made
    of what is not aligned."""
    torch._dynamo.reset()
    f = torch.compile(lambda x, w: x * 2 + w, backend=compile_graph, options={"validate": False})
    memory = torch.zeros(9)
    aligned, odd = torch.arange(8.0), memory[1:]
    for turn in range(4):
        for w in (aligned, odd, aligned.clone(), odd.clone()):
            w.add_(1)
            assert torch.equal(f(torch.ones(8), w), w + 2), turn


def test_a_call_that_could_not_begin_leaves_no_array_of_its_weights(monkeypatch: Any) -> None:
    torch._dynamo.reset()
    f = torch.compile(lambda x, w, v: x * w + v, backend=compile_graph, options={"validate": False})
    x, first, second = torch.ones(64), [torch.full((64,), 2.0), torch.full((64,), 3.0)], [torch.zeros(64) for _ in "wv"]
    assert torch.equal(f(x, *first), torch.full((64,), 5.0))
    borrow, left = type(HOST).borrow, [1]

    def fails(self: Any, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no room for an array")
        return borrow(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(type(HOST), "borrow", fails)
        with pytest.raises(MemoryError, match="no room for an array"):
            f(x, *second)
    assert torch.equal(f(x, *first), torch.full((64,), 5.0))
