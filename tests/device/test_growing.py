"""Streams that never come again: a decoder's lengths, and other ops from one line, are not compiled one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fused_eager import report
from fused_eager.policy import hotness

from .compare import TPU


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Streams are held back as in a program, and none has come before."""
    if torch.tpu.eager_mode is not torch.tpu.EagerMode.DEFER_AND_FUSE:
        pytest.skip("the other modes compile op by op")
    monkeypatch.setattr(hotness, "HOLDS", True)
    for seen in vars(hotness.SKELETONS).values():
        seen.clear()
    yield


def _decode(device: Any, lengths: int) -> list[Tensor]:
    """A cache that grows by one place in each round, attended to by the last."""
    cache, weight = torch.ones(2, 3, 8, device=device), torch.linspace(-1, 1, 64, device=device).reshape(8, 8)
    found = []
    for i in range(lengths):
        cache = torch.cat([cache, torch.full((2, 1, 8), i / 10, device=device)], 1)
        scores = (cache[:, -1:] @ weight @ cache.mT).softmax(-1)
        found.append((scores @ cache).cpu())
    return found


def _compiled() -> int:
    return report().compilations


def test_a_growing_cache_compiles_one_length_and_computes_all() -> None:
    want, before = _decode("cpu", 12), _compiled()
    assert_close(_decode(TPU, 12), want)
    assert _compiled() - before <= 2, "the first round, which makes the cache, and one of those that follow"
    assert_close(_decode(TPU, 12), want)
    assert _compiled() - before <= 1 + hotness.VARIANTS, "lengths that come again are compiled, up to a number"


def test_ops_that_are_others_each_time_are_compiled_once_they_come_again() -> None:
    functions = [torch.sin, torch.tanh, torch.exp, torch.erf, torch.cos, torch.atan]

    def run(device: Any) -> list[Tensor]:
        x = torch.linspace(0, 1, 7, device=device)
        return [f(x * 2).cpu() for f in functions]

    want, before = run("cpu"), _compiled()
    counts = []
    for _ in range(3):
        assert_close(run(TPU), want)
        counts.append(_compiled() - before)
    assert counts[0] <= hotness.BEGUN + 1 and counts[1] <= len(functions) + 1 and counts[2] == counts[1], counts


def test_a_loop_that_settles_is_compiled_in_its_first_rounds() -> None:
    def steps(device: Any, sizes: list[int]) -> list[float]:
        weight = torch.linspace(-1, 2, 32, device=device).reshape(8, 4).requires_grad_()
        optimizer, found = torch.optim.SGD([weight], lr=0.1), []
        for size in sizes:
            loss = (torch.ones(size, 8, device=device) @ weight).tanh().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    sizes = [6, 6, 6, 2] * 3  # the last batch of an epoch is smaller
    assert steps(TPU, sizes) == pytest.approx(steps("cpu", sizes), rel=1e-4)
    before = _compiled()
    assert steps(TPU, sizes) == pytest.approx(steps("cpu", sizes), rel=1e-4)
    assert _compiled() == before
