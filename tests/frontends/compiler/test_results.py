"""What a compiled graph returns: which results share memory, and what autograd knows of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.log.events import Event

Tensor = torch.Tensor


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: (a + b).sin(),
        lambda a, b: (a + b.view(2, 3)).sin(),
        lambda a, b: (a + b.flip(0).flip(0)).t().sin(),
        lambda a, b: torch.cat([a, b.view(2, 3)]).sin(),
    ],
)
def test_no_two_gradients_are_the_same_memory(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    """They would be clipped twice."""
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    wanted = torch.autograd.grad(f(a, b).sum(), (a, b))
    for _ in range(2):
        torch.compile(f, backend=compile_graph)(a, b).sum().backward()
        assert a.grad is not None and b.grad is not None
        a.grad.mul_(2)
        torch.testing.assert_close((a.grad, b.grad), (2 * wanted[0], wanted[1]))
        a.grad = b.grad = None


def test_the_biases_of_a_recurrent_cell_are_clipped_once() -> None:
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(3, 4), torch.randn(2, 3)
    found = []
    for call in (cell, torch.compile(cell, backend=compile_graph)):
        cell.zero_grad()
        sum(call(x)).sum().backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 0.1)
        found.append([p.grad.clone() for p in cell.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("f", "write"),
    [
        (lambda x, w: (x @ w).sin(), lambda x, y: x.add_(1)),  # its transpose is kept
        (lambda x, w: (x[1:] * w).sin(), lambda x, y: x.add_(1)),
        (lambda x, w: w.exp(), lambda x, y: y.mul_(2)),
        (lambda x, w: (w.exp() @ x.t().exp()).exp(), lambda x, y: y.mul_(2)),
        (lambda x, w: torch.view_as_real(torch.view_as_complex(x.view(3, 1, 2)) * w[0, 0]), lambda x, y: x.add_(1)),
    ],
)
def test_what_is_written_before_the_backward_pass_that_needs_it_is_told(
    f: Callable[[Tensor, Tensor], Tensor], write: Callable[[Tensor, Tensor], Tensor]
) -> None:
    for call in (f, torch.compile(f, backend=compile_graph)):
        x, w = torch.randn(3, 2), torch.randn(2, 2, requires_grad=True)
        y = call(x, w)
        with torch.no_grad():
            write(x, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_results_share_memory_as_in_eager() -> None:
    f: Callable[[Tensor], tuple[Tensor, ...]] = lambda x: ((y := x.sin()), y, y.t(), x.cos())  # noqa: E731
    for trains in (False, True):
        found = []
        for call in (f, torch.compile(f, backend=compile_graph)):
            out = call(torch.randn(2, 3, requires_grad=trains))
            found.append(([[a is b for a in out] for b in out],
                          [[a.data_ptr() == b.data_ptr() for a in out] for b in out]))  # fmt: skip
        assert found[0] == found[1]


def test_a_call_on_tensors_without_values_has_none_either() -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1) @ x, backend=compile_graph)
    compiled(torch.ones(3, 3))
    with FakeTensorMode():
        out = compiled(torch.empty(3, 3))
    assert isinstance(out, FakeTensor) and out.shape == (3, 3)
    assert type(compiled(torch.ones(3, 3))) is Tensor


def test_a_number_that_counts_on_cuts_nothing(seen: list[Event]) -> None:
    compiled = torch.compile(lambda x, k: (x * k).exp() + x.float() * k, backend=compile_graph)
    x = torch.ones(3, dtype=torch.bfloat16)
    for k in (0.5, 0.7, 0.9):
        torch.testing.assert_close(compiled(x, k), (x * k).exp() + x.float() * k, rtol=1e-2, atol=1e-2)
    assert not [e for e in seen if e.kind == "island"]


def test_the_gradient_of_a_view_by_strides_is_no_island(seen: list[Event]) -> None:
    f: Callable[[Tensor], Tensor] = lambda x: (x * 2).as_strided((2, 3), (4, 1), 2).sin() * x[0, 0]  # noqa: E731
    found = []
    for call in (f, torch.compile(f, backend=compile_graph)):
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        call(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])
    assert not [e for e in seen if e.kind == "island"]


def test_what_torch_promises_wrongly_and_nobody_reads_is_not_asked_for() -> None:
    """Of the bags' sizes, torch's shape function says another shape than ATen returns."""
    bag, at = torch.nn.EmbeddingBag(7, 3), torch.tensor([[1, 2, 3], [0, 1, 1]])
    compiled = torch.compile(bag, backend=compile_graph)
    with torch.no_grad():
        torch.testing.assert_close(compiled(at), bag(at))
    compiled(at).sum().backward()
    assert bag.weight.grad is not None
    torch.testing.assert_close(bag.weight.grad.sum(), torch.tensor(6.0))
