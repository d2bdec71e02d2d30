"""Control flow in a graph: JAX's own where that is possible, with eager's values and gradients; else torch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from fused_eager import export
from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.log.events import Event

Tensor = torch.Tensor
WEIGHT = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))


def chosen(x: Tensor) -> Tensor:
    """Two conditions that differ in their numbers alone, one in the other, and a result that is laid out as eager's."""
    y = torch.cond(x.sum() > 0, lambda v: (v * 2) @ WEIGHT, lambda v: v.cos() * 3, (x,))
    z = torch.cond(x.sum() > 0, lambda v: (v * 5) @ WEIGHT, lambda v: v.cos() * 7, (x,))
    inner: Callable[[Tensor], Tensor] = lambda v: torch.cond(v.min() > 0, torch.sin, torch.cos, (v,))  # noqa: E731
    return y.sin() + torch.cond(z.max() > 1, inner, torch.exp, (z,))


def repeated(x: Tensor) -> Any:
    def body(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, v * 1.5 + WEIGHT.abs()

    return while_loop(lambda i, v: v.sum() < 100, body, (torch.tensor(0), x.abs()))


def scanned(x: Tensor) -> Any:
    last, rows = scan(lambda c, row: (c * 0.5 + row.sin(), (c * row) @ WEIGHT), torch.zeros(3), x, dim=0)
    return last * 2, rows.exp()


PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "cond": (chosen, True),
    "while_loop": (repeated, False),
    "scan": (scanned, True),
}


def outcome(function: Callable[[Tensor], Any], x: Tensor, trains: bool) -> list[Tensor]:
    given = x.clone().requires_grad_(trains)
    out = function(given)
    tensors = [*out] if isinstance(out, (tuple, list)) else [out]
    gradients = torch.autograd.grad(sum(t.sum() for t in tensors), given) if trains else ()
    return [*[t.detach() for t in tensors], *gradients]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", ["fused", "strict"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_one_region_and_computes_what_eager_does(name: str, mode: str, seen: list[Event]) -> None:
    function, trains = PROGRAMS[name]
    compiled = torch.compile(function, backend=compile_graph, fullgraph=True, options={"mode": mode})
    for x in (WEIGHT, -WEIGHT.abs(), WEIGHT.abs()):
        found, wanted = (outcome(f, x, trains) for f in (compiled, function))
        torch.testing.assert_close(found, wanted)
        assert [t.stride() for t in found] == [t.stride() for t in wanted]
    assert not [e.data for e in seen if e.kind == "island"]
    if mode == "fused":
        assert {e.data["regions"] for e in seen if e.kind == "flush"} == {1}


def either(then: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cond(x.sum() > 0, then, lambda v: v * 2, (x,))


REASONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "random": (either(lambda v: v + torch.rand(3)), "draws random"),
    "checked": (either(lambda v: v[:, v[0].long()]), "values reveal"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_is_left_to_torch_is_told_with_its_reason(name: str, seen: list[Event]) -> None:
    function, words = REASONS[name]
    compiled = torch.compile(function, backend=compile_graph, fullgraph=True)
    x = torch.rand(3, 3)
    outs = []
    for f in (function, compiled):
        torch.manual_seed(0)
        outs.append(f(x))
    torch.testing.assert_close(outs[1], outs[0])
    reasons = [e.data["reason"] for e in seen if e.kind == "island" and e.data["op"] == "cond"]
    assert len(reasons) == 1
    assert words in reasons[0]


def test_it_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,)) + 1

    made = export(Net(), (WEIGHT,), tmp_path / "net")
    for x in (WEIGHT.abs(), -WEIGHT.abs()):
        torch.testing.assert_close(made(x), Net()(x))
