"""`torch.compile(backend="tpu")` on tensors of the device: its graphs' ops are recorded in the device's own stream."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.frontends.device.dynamo import tpu
from fused_eager.log.events import LOG, Event

from .compare import TPU

Tensor = torch.Tensor


def test_a_compiled_model_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    model, x = copy.deepcopy(plain).to(TPU), torch.randn(3, 4)
    plain(x).sum().backward()
    seen: list[Event] = []
    LOG.sinks.append(seen.append)
    try:
        y = torch.compile(model, backend=compile_graph)(x.to(TPU))
        y.sum().backward()
        torch.testing.assert_close(y.detach().cpu(), plain(x).detach())
        grads = [(p.grad.cpu(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]  # type: ignore[union-attr]
    finally:
        LOG.sinks.remove(seen.append)
    for found, expected in grads:
        torch.testing.assert_close(found, expected)
    assert all("recorded as they come" in e.data["unfit"] for e in seen if e.kind == "graph")
    assert not [e for e in seen if e.kind == "island"]


@pytest.mark.parametrize("backend", [tpu, compile_graph], ids=["tpu", "fused_eager"])
def test_dynamo_looks_at_nothing_that_happens_between_two_graphs(backend: Any) -> None:
    """It took the frames of a read's kernel for more of the program, and JAX's NumPy below them for a graph to compile:
    in the middle of the compilation that it would have waited for."""
    parameter = nn.Parameter(torch.ones(3, device=TPU))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(x: Tensor) -> tuple[Any, ...]:
        y = torch.rand_like(x)
        torch._dynamo.graph_break()
        if y.sum() < 100:
            y = y * 0 + x
        parameter.grad = y * parameter.detach()
        optimizer.step()
        scheduler.step()
        return y, y.tolist(), y.cpu().numpy().sum(), parameter.detach().cpu()

    compiled = torch.compile(step, backend=backend)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for wanted in (0.5, 0.15):
            y, numbers, total, moved = compiled(torch.ones(3, device=TPU))
            assert (y.tolist(), numbers, total) == ([1] * 3, [1] * 3, 3)
            torch.testing.assert_close(moved, torch.full((3,), wanted))
    assert not [w for w in warned if "Dynamo" in str(w.message)]


def test_an_error_of_a_graph_names_the_line_of_the_program() -> None:
    def chosen(x: Tensor, at: Tensor) -> Tensor:
        return x[at] * 2

    line = chosen.__code__.co_firstlineno + 1
    with pytest.raises(IndexError, match=f"index 7 is out of bounds.* at {__file__}:{line}"):
        torch.compile(chosen, backend=tpu)(torch.ones(3, device=TPU), torch.tensor([7], device=TPU)).tolist()
