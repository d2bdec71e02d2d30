"""`torch.compile(backend="tpu")` on tensors of the device: its graphs' ops are recorded in the device's own stream."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.log.events import LOG, Event

from .compare import TPU


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
