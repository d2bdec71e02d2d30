"""Copies among the devices of one process: `DataParallel`, and the functions of `torch.nn.parallel.comm`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm, gather, scatter

from fused_eager.frontends.device import replicas

from .compare import TPU

COUNT = torch.tpu.device_count()  # type: ignore[attr-defined]
ALL = [torch.device("tpu", index) for index in range(COUNT)]


@pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL")
def test_replicas_train_as_one_model() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = nn.DataParallel(copy.deepcopy(plain).to(TPU))
    assert model.device_ids == list(range(COUNT))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for _ in range(3):
        x, losses = torch.randn(4 * COUNT, 4), []
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(m(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1].cpu(), losses[0])
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())


class Several(nn.Module):
    """Takes a keyword and returns a dictionary."""

    def forward(self, x: torch.Tensor, *, times: int) -> dict[str, torch.Tensor]:
        return {"rows": x * times, "sum": x.sum()}


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_dictionaries_and_keywords_pass_through() -> None:
    found = nn.DataParallel(Several())(torch.ones(COUNT, 3), times=2)
    assert found["rows"].tolist() == [[2, 2, 2]] * COUNT and found["sum"].flatten().tolist() == [3] * COUNT


def test_scatter_and_gather_are_each_others_inverse_and_have_gradients() -> None:
    x = torch.arange(2.0 * COUNT, requires_grad=True)
    parts = scatter(x, ALL)
    assert [part.device for part in parts] == ALL
    back = gather([part * (i + 1) for i, part in enumerate(parts)], TPU)
    assert back.device == TPU
    back.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [i + 1 for i in range(COUNT) for _ in range(2)]
    assert gather([part.detach() for part in parts], "cpu").is_cpu


def test_sizes_of_chunks_may_be_given() -> None:
    sizes = [1, 3, *[0] * COUNT][:COUNT]
    x = torch.arange(float(sum(sizes)))
    parts = comm.scatter(x, ALL, chunk_sizes=sizes)
    assert [len(part) for part in parts] == sizes and comm.gather(parts).cpu().tolist() == x.tolist()


def test_broadcast_and_reduce() -> None:
    x = torch.arange(3.0, device=TPU)
    copies = comm.broadcast(x, ALL)
    assert copies[0] is x and [c.device for c in copies] == ALL and all(c.tolist() == [0, 1, 2] for c in copies)
    groups = comm.broadcast_coalesced([x, x * 2], ALL)
    assert [[t.tolist() for t in group] for group in groups] == [[[0, 1, 2], [0, 2, 4]]] * COUNT


def test_results_may_be_written_into_tensors() -> None:
    x, into = torch.arange(2.0 * COUNT, device=TPU), [torch.zeros(2, device=device) for device in ALL]
    assert all(a is b for a, b in zip(comm.scatter(x, out=into), into, strict=True))
    whole = torch.zeros(2 * COUNT, device=TPU)
    assert comm.gather(into, out=whole) is whole and torch.equal(whole, x)
    comm.broadcast(x[:2], out=into)
    assert all(t.tolist() == [0, 1] for t in into)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: comm.gather([torch.ones(2)]), r"on the device tpu, but tensors\[0\] is on cpu"),
        (lambda: comm.gather([]), "at least one tensor"),
        (lambda: comm.scatter(torch.ones(3), ALL, chunk_sizes=[2] * COUNT), "sum exactly to 3"),
        (lambda: comm.scatter(torch.ones(3), ALL, chunk_sizes=[1] * (COUNT + 1)), "same length"),
        (lambda: comm.gather([torch.ones(2, device=TPU)], out=torch.ones(3, device=TPU)), r"shape \[2\]"),
        (lambda: comm.gather([torch.ones(2, 2, device=TPU), torch.ones(2, 3, device=TPU)]), "tensor 1"),
        (lambda: comm.broadcast_coalesced([torch.ones(2)], ALL), "tensor 0 is on cpu"),
        (lambda: comm.broadcast(torch.ones(2), ["tpu:99"]), "no device 99"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        call()


def test_what_is_on_no_device_is_left_to_a_build_for_cuda() -> None:
    served = replicas._serving(lambda *args: "torch's", lambda *args: "ours")
    assert served([torch.ones(2)], 0, None) == "torch's" and served([torch.ones(2, device=TPU)], 0, None) == "ours"
