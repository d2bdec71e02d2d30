"""Modes of torch's functions, of which a default device is one: they see what the program calls, and nothing of what
the runtime does for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import fused_eager as fe
from fused_eager import fused_eager

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "strict": {"mode": "strict"},
    "debug": {"mode": "debug"},
    "wait": {"compile": "wait"},
    "never": {"compile": "wait", "native": "never"},
}
Tensors = tuple[torch.Tensor, ...]
LARGE = 1 << 18  # numbers: over addresses without memory until it has its values


def pending() -> Tensors:
    """Values that have not been computed: small, large, and in memory of the program's."""
    own = torch.zeros(3, device="cpu")
    own += 2
    return torch.ones(3, device="cpu") * 2, torch.ones(LARGE, device="cpu") * 2, own


def left(given: dict[str, Any], device: str) -> Tensors:
    with torch.device(device), fused_eager(**given):
        return pending()


def synced(given: dict[str, Any], device: str) -> Tensors:
    with fused_eager(**given):
        made = pending()
        with torch.device(device):
            fe.sync()
        return made


def read(given: dict[str, Any], device: str) -> Tensors:
    with fused_eager(**given):
        made = pending()
        with torch.device(device):
            values = [np.asarray(t) for t in made]
        return tuple(map(torch.from_numpy, values))


def stepped(given: dict[str, Any], device: str) -> Tensors:
    p = torch.nn.Parameter(torch.ones(LARGE))
    with fused_eager(**given):
        optimizer = torch.optim.SGD([p], lr=0.25)
        with torch.device(device):
            for _ in range(2):
                optimizer.zero_grad()
                (p * p).sum().backward()
                optimizer.step()
            assert p.grad is not None
            return p.detach() * 8, p.grad * 2


WAYS: list[Callable[[dict[str, Any], str], Tensors]] = [left, synced, read, stepped]


@pytest.fixture(autouse=True)
def no_default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_what_the_runtime_makes_is_not_on_the_default_device(
    way: Callable[[dict[str, Any], str], Tensors], mode: str
) -> None:
    for t in way(MODES[mode], "meta"):
        assert t.device.type == "cpu" and (t == 2).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_default_device_for_all_of_the_program(mode: str) -> None:
    torch.set_default_device("meta")
    with fused_eager(**MODES[mode]):
        made = pending()
        made[0].add_(1)
        assert torch.nn.Linear(2, 3).weight.device.type == "meta"
        assert made[0].tolist() == [3, 3, 3]
    assert [float(t.sum()) for t in made] == [9, 2 * LARGE, 6]


class Seen(TorchFunctionMode):
    """Notes the names of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def program() -> tuple[list[str], list[float]]:
    """A training step and reads of many kinds, under a mode that notes what is called; and what came of it."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.GELU(), torch.nn.Linear(5, 2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False)
    x = torch.randn(3, 4)
    with Seen() as seen:
        for _ in range(3):
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
        found = [loss.item(), *layer[0].weight[0].tolist()]
        found.append(float(torch.cat([x, x * 2]).sort(0).values.sum()))
    return seen.names, found


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sees_what_it_sees_in_eager(mode: str) -> None:
    names, values = program()
    for _ in range(2):
        with fused_eager(**MODES[mode]):
            ours, found = program()
        assert ours == names
        assert found == pytest.approx(values, rel=1e-5)


def test_an_op_of_the_programs_own_sees_the_default_device_in_a_backward_pass() -> None:
    made: list[str] = []

    @torch.library.custom_op("function_modes::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.empty(1).device.type)
        return x * 2

    twice.register_autograd(lambda ctx, grad: twice(grad))

    def run() -> list[str]:
        made.clear()
        x = torch.ones(3, requires_grad=True, device="cpu")
        with torch.device("meta"):
            twice(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
        return list(made)

    plain = run()
    with fused_eager(compile="wait", native="never"):
        assert run() == plain
