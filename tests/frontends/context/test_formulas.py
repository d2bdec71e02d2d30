"""Formulas: where autograd has another one below a mode, eager's is taken, and the mode is there again after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fused_eager import fused_eager
from fused_eager.errors import IslandRefused
from fused_eager.frontends.context.threads import current_door
from fused_eager.quiet import stack
from tests.streams import events

INF = float("inf")
WAIT: dict[str, Any] = {"compile": "wait", "native": "never", "progress": False}


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_mode_is_there_for_hooks_behind_the_node_and_after_it() -> None:
    seen: list[bool] = []
    x = torch.tensor([1.0, 2.0, INF], requires_grad=True)
    with fused_eager(**WAIT), events("island") as islands:
        y = (x * 2).prod()
        y.grad_fn.register_hook(lambda *gradients: seen.append(current_door() in stack()))
        (y + 1).backward()
        seen.append(current_door() in stack())
        assert x.grad is not None and x.grad.isnan().tolist() == [False, False, True]
    assert seen == [True, True] and not stack()
    assert ["prod" in e.data["op"] for e in islands] == [True]


def test_a_node_that_raises_leaves_the_mode_where_it_is() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with fused_eager(**WAIT):
        y = x.prod()
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        assert stack() == [current_door()]
        with pytest.raises(RuntimeError, match="second time"):
            y.grad_fn(torch.ones(()))
        assert stack() == [current_door()]


def second_derivative(x: torch.Tensor) -> list[list[float]]:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((x * 1).prod(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    return [first.tolist(), second.tolist()]


def recomputed(x: torch.Tensor) -> list[float]:
    x = x.clone().requires_grad_()
    checkpoint(lambda x: (x * 2 + 1).prod() * x.sum(), x, use_reentrant=False).backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("program", [second_derivative, recomputed])
@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [0.0, 2.0, 3.0], [0.0, 0.0, 3.0]], ids=str)
def test_derivatives_of_it_are_eagers(program: Any, values: list[float]) -> None:
    x = torch.tensor(values)
    want = program(x)
    with fused_eager(**WAIT):
        assert program(x) == pytest.approx(want) if program is recomputed else program(x) == want


def test_below_a_mode_of_the_programs_the_formula_is_that_of_modes() -> None:
    def gradient() -> list[float]:
        x = torch.tensor([1.0, 2.0, INF], requires_grad=True)
        with Passing():
            (x * 1).prod().backward()
        assert x.grad is not None
        return x.grad.tolist()

    want = gradient()
    with fused_eager(**WAIT):
        assert gradient() == want


def test_where_islands_are_refused_it_is_refused_with_its_reason() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with fused_eager(islands="refuse", **WAIT), pytest.raises(IslandRefused, match="another formula"):
        x.prod().backward()
    assert not stack()
