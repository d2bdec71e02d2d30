"""Donation where a region makes checks: a training step overwrites its parameters in place, and a step that is refused
leaves them as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_eager.compiling.ready import Ready
from fused_eager.executing import run
from fused_eager.frontends.device.doors import DOORS, set_options

from .compare import TPU

WORDS = 30


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.inner(self.embedding(x))))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, WORDS, (4, 5)), torch.randint(0, WORDS, (4, 5))


Pair = tuple[tuple[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]


@pytest.fixture
def pair() -> Pair:
    """The same model and optimizer on the CPU and on the device, two steps trained."""
    torch.manual_seed(0)
    models = [model := Model(), copy.deepcopy(model).to(TPU)]
    made = [(m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)) for m in models]
    for _ in range(2):
        given = batch()
        for m, optimizer in made:
            train(m, optimizer, *given)
    torch.tpu.synchronize()
    return made[0], made[1]


def same(pair: Pair) -> None:
    (a, of_a), (b, of_b) = pair
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())
        torch.testing.assert_close(of_b.state[q]["momentum_buffer"].cpu(), of_a.state[p]["momentum_buffer"])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Ready]:
    """What runs the device's streams."""
    found: list[Ready] = []
    load = run.load

    def loaded(*args: Any) -> Ready:
        found.append(load(*args))
        return found[-1]

    monkeypatch.setattr(run, "load", loaded)
    return found


@pytest.fixture(params=[None, 8], ids=["one region", "regions"])
def cut(request: pytest.FixtureRequest) -> Iterator[None]:
    before = DOORS[0].stream.config.max_region
    set_options(max_region=request.param or before)
    yield
    set_options(max_region=before)


def test_a_step_with_checks_overwrites_parameters_and_moments(cut: None, pair: Pair, plans: list[Ready]) -> None:
    given = batch()
    losses = [train(m, optimizer, *given) for m, optimizer in pair]
    torch.tpu.synchronize()
    if DOORS[0].stream.config.mode == "fused":
        steps = [r for r in plans if r.checked]
        overwritten = sum(len(o) for o in steps[0].commits)
        assert overwritten == 2 * len(list(pair[0][0].parameters()))
    torch.testing.assert_close(losses[1].cpu(), losses[0])
    same(pair)


@pytest.mark.parametrize("later", [0, 1, 2])
@pytest.mark.parametrize("wrong", ["word", "target"])
def test_a_step_that_is_refused_leaves_all_as_it_was(cut: None, pair: Pair, wrong: str, later: int) -> None:
    x, y = batch()
    bad = {"word": x, "target": y}[wrong].clone()
    bad[1, 1] = WORDS + 3
    free = torch.ones(3, device=TPU)
    with pytest.raises(IndexError, match=f"{WORDS + 3} is out of bounds|out of range in self"):
        free.add_(1)  # of the same region, and nothing that was refused
        train(*pair[1], *((bad, y) if wrong == "word" else (x, bad)))
        for _ in range(later):  # they begin with what was refused, and so have not happened either
            train(*pair[1], x, y)
        torch.tpu.synchronize()
    assert free.tolist() == [2.0] * 3
    same(pair)
    for m, optimizer in pair:
        train(m, optimizer, x, y)
    same(pair)


def test_what_is_written_where_it_was_checked_goes_back_too() -> None:
    cache, other = torch.zeros(6, 2, device=TPU), torch.zeros(6, 2, device=TPU)
    torch.tpu.synchronize()
    at = torch.tensor([1, 9], device=TPU)
    cache.index_copy_(0, torch.tensor([2], device=TPU), torch.ones(1, 2, device=TPU))
    torch.tpu.synchronize()
    other.add_(1)
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        cache.mul_(2).index_add_(0, at, torch.ones(2, 2, device=TPU)).add_(5)
        torch.tpu.synchronize()
    assert cache.sum().item() in (2.0, 4.0)  # op by op, the product has been written
    assert other.sum().item() == 12
