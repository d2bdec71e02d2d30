"""Steady training loops compile nothing after their second round, and train as plain eager does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from tests.streams import compilations_per_round, stable_shapes

ROUNDS = 7
Step = Callable[[int], object]


@pytest.fixture(autouse=True)
def compiled_at_sight() -> Iterator[None]:
    with stable_shapes():
        yield


class Trainer:
    """A small classifier with everything that its loops need; `losses` are tensors until the end."""

    def __init__(self, optimizer: str = "adam", dropout: float = 0.1):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
        made = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
        extra: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
        self.optimizer = made(self.model.parameters(), lr=1e-2, **extra)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.x, self.y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        self.losses: list[Any] = []

    def loss(self, n: int = 8) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self.x[:n]), self.y[:n])

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()


def adam(read: bool) -> tuple[Trainer, Step]:
    t = Trainer()

    def step(i: int) -> None:
        loss = t.loss()
        t.update(loss)
        t.losses.append(loss.item() if read else loss.detach())

    return t, step


def sgd(read: bool) -> tuple[Trainer, Step]:
    t = Trainer("sgd", dropout=0.0)

    def step(i: int) -> None:
        loss = t.loss()
        t.update(loss)
        if read:
            t.losses.append(loss.item())

    return t, step


def clipped(read: bool) -> tuple[Trainer, Step]:
    t = Trainer()

    def step(i: int) -> None:
        t.optimizer.zero_grad()
        loss = t.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
        t.optimizer.step()
        if read:
            t.losses.append(loss.item())

    return t, step


def accumulating(read: bool) -> tuple[Trainer, Step]:
    """A round is three micro-steps: the shape of the loop repeats with every update."""
    t = Trainer()

    def step(i: int) -> None:
        t.optimizer.zero_grad()
        for _ in range(3):
            loss = t.loss() / 3
            loss.backward()
            if read:
                t.losses.append(loss.item())
        t.optimizer.step()

    return t, step


def evaluating(read: bool) -> tuple[Trainer, Step]:
    """A round is five training steps and an evaluation."""
    t = Trainer()

    def step(i: int) -> None:
        for _ in range(5):
            t.update(t.loss())
        t.model.eval()
        with torch.no_grad():
            right = (t.model(t.x).argmax(1) == t.y).float().mean()
        t.model.train()
        t.losses.append(right.item() if read else right)

    return t, step


def odd_batches(read: bool) -> tuple[Trainer, Step]:
    """A round is an epoch whose last batch is smaller."""
    t = Trainer()

    def step(i: int) -> None:
        for n in (8, 8, 5):
            loss = t.loss(n)
            t.update(loss)
            if read:
                t.losses.append(loss.item())

    return t, step


def running_total(read: bool) -> tuple[Trainer, Step]:
    """The usual bookkeeping: a sum on the device, read at the end of each round."""
    t = Trainer()

    def step(i: int) -> None:
        total = torch.zeros(())
        for _ in range(3):
            loss = t.loss()
            t.update(loss)
            total += loss.detach()
        if read:
            t.losses.append(total.item())

    return t, step


LOOPS = [adam, sgd, clipped, accumulating, evaluating, odd_batches, running_total]


@pytest.mark.parametrize("read", [False, True], ids=["never read", "read each round"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_nothing_is_compiled_after_the_second_round(loop: Callable[[bool], tuple[Trainer, Step]], read: bool) -> None:
    expected, plain = loop(read)
    for i in range(ROUNDS):
        plain(i)
    with fused_eager():
        trained, step = loop(read)
        counts = compilations_per_round(step, ROUNDS)
    assert not any(counts[2:]), f"compilations in each round: {counts}"
    assert len(trained.losses) == len(expected.losses)
    for e, a in zip(expected.losses, trained.losses, strict=True):
        assert float(a) == pytest.approx(float(e), rel=1e-4, abs=1e-6)
    for p, q in zip(expected.model.parameters(), trained.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-5)
