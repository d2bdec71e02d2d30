"""Stages: on which thread and of which client's they run, and what other threads can do meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.deferred import xla_client
from torch import nn

from fused_eager import fused_eager
from fused_eager.devices.buffer import LOCK
from fused_eager.devices.home import Home
from fused_eager.devices.host.device import HOST, INLINE, SMALL, Host
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


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the memory that was described to JAX."""
    found: list[tuple[int, ...]] = []
    plain = type(INLINE).borrow

    def noted(self: Host, address: int, home: Home, anew: bool) -> Any:
        found.append(home[1])
        return plain(self, address, home, anew)

    monkeypatch.setattr(Host, "borrow", noted)
    return found


def test_what_a_graph_has_made_is_not_described_again_to_the_next(borrowed: list[tuple[int, ...]]) -> None:
    f = compiled(lambda x: x.sin() * 2, validate=False)
    g = compiled(lambda x: x.cos() + 1, validate=False)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(32, 1024)  # as large as what is not copied
            y = f(x)
            borrowed.clear()
            torch.testing.assert_close(g(y), (x.sin() * 2).cos() + 1)
            assert borrowed == []
            y.mul_(3)  # by torch, in the same memory
            torch.testing.assert_close(g(y), (x.sin() * 6).cos() + 1)
            y.data = y.data[:16].clone().repeat(2, 1)  # other memory, of the same shape
            torch.testing.assert_close(g(y), (x.sin() * 6)[:16].repeat(2, 1).cos() + 1)


def test_what_a_graph_has_made_goes_with_its_tensor() -> None:
    f = compiled(lambda x: x.sin() * 2, validate=False)
    g = compiled(lambda x: x.cos() + 1, validate=False)
    x = torch.randn(32, 1024)

    def live() -> int:
        xla_client._xla.collect_garbage()
        return len(INLINE.xla.client.live_arrays())

    with torch.no_grad():
        g(f(x))
        before = live()
        for _ in range(5):
            z = g(f(x))
        assert live() <= before + 1 and z.shape == x.shape
        del z
        assert live() <= before


@pytest.mark.parametrize("validate", [True, False])
def test_inputs_of_a_bucket_are_what_their_memory_says(validate: bool) -> None:
    options = {"validate": validate}
    f = torch.compile(lambda x, y: x @ y.mT + x.sum(), backend="fused_eager", dynamic=True, options=options)
    for n in (9, 14, 15, 13, 14, 15):
        wide = torch.randn(n, 16)
        for x in (wide[:, :8], wide.T.contiguous().T[:, :8], wide[:, :8].contiguous(), torch.randn(n, 8).conj()):
            torch.testing.assert_close(f(x, x + 1), x @ (x + 1).mT + x.sum())
    f = torch.compile(lambda x: x * 2, backend="fused_eager", dynamic=True, options=options)
    for n in (9, 14, 15, 13, 14, 15):
        x = torch.randn(n, 8, dtype=torch.complex64)
        for given in (x, x.conj(), x.imag._neg_view()):
            torch.testing.assert_close(f(given), given * 2)


@pytest.mark.parametrize("validate", [True, False])
def test_a_part_of_a_buffer_is_padded_where_the_graph_has_all_of_it(validate: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        buffer[: len(x)] += x
        return buffer.sum(), buffer[: len(x)].mean(0)

    g = torch.compile(f, backend="fused_eager", dynamic=True, options={"validate": validate})
    given = [torch.randn(n, 3) for n in (9, 13, 14, 16, 15)]
    found = []
    for function in (f, g):
        buffer = torch.zeros(64, 3)
        found.append([*map(function, given), buffer])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
