"""Sparse tensors on the device: what torch has for them on the CPU, their gradients, and optimizers that take them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fused_eager.log.events import LOG

from .compare import TPU

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
Tensor = torch.Tensor
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def coo(device: Any) -> Tensor:
    """A matrix with an element that is given twice."""
    indices = torch.tensor([[0, 1, 1, 0], [2, 0, 2, 2]])
    return torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, 5.0, 1.0]), (2, 3)).to(device)


def compressed(device: Any, layout: torch.layout) -> Tensor:
    blocks = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return torch.tensor([[0.0, 0, 3], [4, 0, 5]], device=device).to_sparse(layout=layout, blocksize=blocks)


def seen(value: Any) -> Any:
    """All that a program sees of a value, as lists and numbers: of a sparse tensor its layout and its parts."""
    if isinstance(value, (list, tuple)):
        return [seen(v) for v in value]
    if not isinstance(value, Tensor):
        return value
    t = value.detach()
    looks = [str(t.layout), tuple(t.shape), t.dtype]
    if t.layout is torch.sparse_coo:
        return [*looks, t.is_coalesced(), _rounded(t._indices()), _rounded(t._values())]
    if t.layout is torch.strided:
        return [*looks, _rounded(t)]
    by_rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    parts = (t.crow_indices(), t.col_indices()) if by_rows else (t.ccol_indices(), t.row_indices())
    return [*looks, *map(_rounded, (*parts, t.values()))]


def _rounded(t: Tensor) -> Any:
    return (t.cpu() * 1000).round().tolist() if t.is_floating_point() else t.cpu().tolist()


def agree(program: Callable[[Any], Any]) -> None:
    want, got = program("cpu"), program(TPU)
    assert seen(got) == seen(want)
    assert all(t.device == TPU for t in (got if isinstance(got, (list, tuple)) else [got]) if isinstance(t, Tensor))


DENSE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, 1.5]])


@pytest.mark.parametrize(
    "program",
    [
        lambda s, d: s,
        lambda s, d: [s.coalesce(), s.to_dense(), s._nnz(), s.sparse_dim(), s.dense_dim()],
        lambda s, d: [s.coalesce().indices(), s.coalesce().values()],
        lambda s, d: [(s + s).coalesce(), (s - s).coalesce(), s * 2, s * s, s**2, s.t(), s.double()],
        lambda s, d: [s.sqrt(), s.relu(), s.neg(), s.clone(), s.norm(), torch.zeros_like(s)],
        lambda s, d: [torch.ones(2, 3, device=d) + s, torch.ones(2, 3, device=d).sub_(s, alpha=2)],
        lambda s, d: torch.add(torch.ones(2, 3, device=d), s, out=torch.empty(0, device=d)),
        lambda s, d: [s @ DENSE.to(d), s @ torch.ones(3, device=d), torch.sparse.mm(s, s.t())],
        lambda s, d: torch.addmm(torch.ones(2, 2, device=d), s, DENSE.to(d)),
        lambda s, d: torch.bmm(torch.stack([s, s]), torch.ones(2, 3, 2, device=d)),
        lambda s, d: [torch.sparse.sum(s), torch.sparse.sum(s, 1), torch.sparse.softmax(s, 1)],
        lambda s, d: torch.arange(6.0, device=d).reshape(2, 3).sparse_mask(s.coalesce()),
        lambda s, d: [s.index_select(0, torch.tensor([1], device=d)), s[1], torch.cat([s, s])],
        lambda s, d: [s.clone().zero_(), s.clone().copy_(s * 2), s.clone().mul_(3)],
        lambda s, d: [s.to_sparse_csr(), s.to_sparse_csc()],
        lambda s, d: [copy.deepcopy(s), pickle.loads(pickle.dumps(s))],
        lambda s, d: torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (2, 3), device=d),
        lambda s, d: [torch.eye(3, device=d).to_sparse(), torch.eye(3, device=d).to_sparse(1)],
    ],
)
def test_a_tensor_in_coordinates_computes_as_on_the_cpu(program: Callable[..., Any]) -> None:
    agree(lambda d: program(coo(d), d))


@pytest.mark.parametrize("layout", COMPRESSED, ids=str)
@pytest.mark.parametrize(
    "program",
    [
        lambda s, d: [s, s.to_dense(), s._nnz(), s.to_sparse(), s.t(), s.double(), s.clone()],
        lambda s, d: [s * 2, s + s, s.sqrt(), s.sum()],
        lambda s, d: [s @ DENSE.to(d), s @ torch.ones(3, device=d)] if "bsc" not in str(s.layout) else s,
        lambda s, d: [torch.ones(2, 2, device=d) @ s, torch.ones(2, 3, device=d) + s] if "csr" in str(s.layout) else s,
        lambda s, d: [copy.deepcopy(s.to_sparse()), pickle.loads(pickle.dumps(s))],
    ],
)
def test_a_compressed_tensor_computes_as_on_the_cpu(program: Callable[..., Any], layout: torch.layout) -> None:
    agree(lambda d: program(compressed(d, layout), d))


def test_rows_that_are_compressed_can_more() -> None:
    def program(d: Any) -> list[Tensor]:
        s = compressed(d, torch.sparse_csr)
        a, b = torch.ones(2, 2, device=d), torch.ones(2, 3, device=d)
        return [s @ s.t(), torch.sparse.sampled_addmm(s, a, b), torch.sparse.mm(s, DENSE.to(d), "mean"), s.sum(0, True)]

    agree(program)


def test_they_go_there_and_back() -> None:
    for s in (coo("cpu"), *(compressed("cpu", layout) for layout in COMPRESSED)):
        there = s.to(TPU)
        assert (there.device, there.layout) == (TPU, s.layout) and "device='tpu:0'" in repr(there)
        assert seen(there.cpu()) == seen(s)


def trained(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Any], list[Tensor]]:
    def program(d: Any) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=True).to(d)
        optimizer = make(table.parameters())
        for i in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 3, 1, i], device=d)).pow(2).sum().backward()
            optimizer.step()
        grad = table.weight.grad
        assert grad is not None
        state = optimizer.state_dict()["state"].get(0, {}).values()
        return [table.weight.detach(), grad, *(t for t in state if isinstance(t, Tensor) and t.ndim)]

    return program


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_optimizers_take_sparse_gradients(make: Callable[..., torch.optim.Optimizer]) -> None:
    agree(trained(lambda parameters: make(parameters, lr=0.1)))


def test_sparse_gradients_add_up() -> None:
    def program(d: Any) -> list[Tensor]:
        torch.manual_seed(0)
        table, bag = nn.Embedding(5, 2, sparse=True).to(d), nn.EmbeddingBag(5, 2, sparse=True, mode="sum").to(d)
        for _ in range(2):
            table(torch.tensor([1, 3, 1], device=d)).pow(2).sum().backward()
            bag(torch.tensor([1, 3, 1, 0], device=d), torch.tensor([0, 2], device=d)).pow(2).sum().backward()
        sparse = [p.grad.coalesce() for p in (table.weight, bag.weight) if p.grad is not None]
        (table(torch.tensor([1], device=d)).sum() + table.weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(table.parameters(), 1.0)
        return [*sparse, table.weight.grad]  # type: ignore[list-item]

    agree(program)


def test_gradients_of_sparse_products() -> None:
    def program(d: Any) -> list[Tensor]:
        a, b = coo(d).requires_grad_(), DENSE.clone().to(d).requires_grad_()
        torch.sparse.mm(a, b).pow(2).sum().backward()
        c, e = torch.eye(3, device=d, requires_grad=True), compressed(d, torch.sparse_csr).requires_grad_()
        ((c.to_sparse().to_dense() * 2).sum() + (e @ b.detach()).pow(2).sum()).backward()
        return [a.grad.to_dense(), b.grad, c.grad, e.grad.to_dense()]  # type: ignore[union-attr,list-item]

    agree(program)


def test_what_has_no_values_in_the_open_is_refused_as_on_the_cpu() -> None:
    for d in ("cpu", TPU):
        with pytest.raises(NotImplementedError, match="Cannot access storage of Sparse"):
            coo(d).untyped_storage()
        with pytest.raises(RuntimeError, match=r"more than one element|cannot be converted to Scalar"):
            coo(d).item()


def test_a_sparse_gradient_is_added_without_fetching() -> None:
    table = nn.Embedding(9, 4, sparse=True).to(TPU)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    islands = len(LOG.of("island"))
    for _ in range(2):
        table(torch.tensor([1, 3, 1], device=TPU)).pow(2).sum().backward()
        table(torch.tensor([1, 5, 1], device=TPU)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(LOG.of("island")) == islands


@pytest.mark.skipif(torch.tpu.device_count() < 2, reason="one device")  # type: ignore[attr-defined]
def test_they_lie_on_the_device_that_was_asked_for() -> None:
    there = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)).to("tpu:1")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="tpu:1")
    assert {there.device, there.coalesce().device, nested.device} == {torch.device("tpu:1")}
    assert (there @ torch.eye(2, device="tpu:1")).tolist() == [[0, 1], [2, 0]] and torch.tpu.current_device() == 0
