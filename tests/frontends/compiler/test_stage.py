"""Stages: on which thread and of which client's they run, and what other threads can do meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from fused_eager.devices.buffer import LOCK
from fused_eager.devices.host.device import HOST, INLINE, SMALL
from fused_eager.executing.prepared import Prepared
from fused_eager.frontends.compiler import stage
from fused_eager.log.events import Event

Tensor = torch.Tensor


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[stage.Stage]:
    """The stages that have been run."""
    found: list[stage.Stage] = []
    plain = stage.Stage.run

    def noted(self: stage.Stage, slots: Any) -> None:
        found.append(self)
        plain(self, slots)

    monkeypatch.setattr(stage.Stage, "run", noted)
    return found


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend="fused_eager", options=options)


@pytest.mark.parametrize("validate", [True, False])
def test_what_is_little_runs_on_the_thread_that_calls_it(run: list[stage.Stage], validate: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return (x.relu() * 3).sum(-1)

    g = compiled(f, validate=validate)
    for rows in (4, SMALL // 4096):
        x = torch.randn(rows, 1024)
        torch.testing.assert_close(g(x), f(x))
    assert [s.work.device for s in run] == [INLINE, HOST]


@pytest.mark.parametrize("skipped", [1, 2, 16])
@pytest.mark.parametrize("validate", [True, False])
def test_memory_need_not_be_aligned(run: list[stage.Stage], validate: bool, skipped: int) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        x.add_(1)
        return x @ w

    whole, w = torch.randn(64 + skipped), torch.randn(64 + skipped)
    plain = whole.clone()
    expected = f(plain[skipped:].view(8, 8), w[skipped:].view(8, 8))
    for _ in range(2):
        given = whole.clone()
        found = compiled(f, validate=validate)(given[skipped:].view(8, 8), w[skipped:].view(8, 8))
        torch.testing.assert_close(found, expected)
        assert torch.equal(given, plain)
    assert {s.work.device for s in run} == {INLINE}


def test_other_threads_have_the_runtime_while_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)
    x, free = torch.randn(3, 8), []
    plain = Prepared.run

    def asked(self: Prepared, values: dict[int, Any]) -> None:
        def take() -> None:
            free.append(LOCK.acquire(timeout=5))
            if free[-1]:
                LOCK.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        plain(self, values)

    monkeypatch.setattr(Prepared, "run", asked)
    torch.testing.assert_close(compiled(model, validate=False)(x), model(x))
    assert free == [True]


def test_what_one_door_compiled_is_loaded_for_the_other(run: list[stage.Stage], seen: list[Event]) -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sin() + 1).cumsum(0)

    x = torch.randn(5)
    with torch.no_grad():
        found = compiled(f)(x)
        assert run[0].work.device is INLINE
        with fused_eager(compile="wait"):
            assert torch.equal(f(x), found)
    told = [e.kind for e in seen]
    assert told.count("compile") == 1 and told.count("flush") == 2


def test_threads_compute_with_the_same_function_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).requires_grad_(False)
    g = compiled(model, validate=False)
    given = [torch.randn(6, 16) for _ in range(4)]
    expected = [model(x) for x in given]
    g(given[0])
    wrong: list[int] = []

    def work(at: int) -> None:
        for _ in range(100):
            if not torch.allclose(g(given[at]), expected[at], rtol=1e-4, atol=1e-5):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
