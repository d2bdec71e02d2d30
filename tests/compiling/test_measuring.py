"""Samples: which flushes are timed, what is timed in them, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.compiling import measuring
from fused_eager.frontends.context.intercept import FrontDoor
from fused_eager.frontends.context.threads import current_door
from fused_eager.reporting.writer import want_details
from tests.streams import events, stable_shapes


@contextmanager
def details() -> Iterator[None]:
    want_details(1)
    try:
        yield
    finally:
        want_details(-1)


def step(x: torch.Tensor) -> float:
    return float((x * 1.5 + 0.5).sum())


def test_few_flushes_of_a_plan_are_timed() -> None:
    chosen = [n for n in range(1, 130) if measuring._is_sampled(-1)]
    assert chosen == [2, 4, 8, 16, 32, 64, 96, 128]


def test_regions_and_recording_are_timed_when_details_are_wanted() -> None:
    x = torch.ones(50, 50)
    with stable_shapes(), details(), fused_eager(cache="off"), events("run", "recording", "flush") as seen:
        for _ in range(20):
            step(x)
    runs = [e.data for e in seen if e.kind == "run"]
    assert len(runs) >= 4 and all(0 < r["seconds"] < 5 and r["how"] == "xla" for r in runs)
    recordings = [e.data for e in seen if e.kind == "recording"]
    assert recordings and all(r["ops"] == 3 and 0 < r["seconds"] < 1 for r in recordings)


def test_nothing_is_timed_otherwise() -> None:
    with fused_eager(), events("run", "recording") as seen:
        for _ in range(10):
            step(torch.ones(5))
    assert not seen


def test_the_front_door_is_itself_again_after_a_timed_stream() -> None:
    x = torch.ones(5)
    kinds = set()
    with details(), fused_eager():
        for _ in range(12):
            step(x)
            kinds.add(type(current_door()))
        assert isinstance(current_door(), FrontDoor)
    assert FrontDoor in kinds
    with fused_eager():
        step(x)
        assert type(current_door()) is FrontDoor


def test_timed_runs_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "every_run", True)
    x = torch.arange(12.0, requires_grad=True)
    with details(), fused_eager():
        y = (x.reshape(3, 4) @ torch.ones(4, 2)).relu()
        y.sum().backward()
        y.data.mul_(2.0)
    assert x.grad is not None and x.grad.tolist() == [2.0] * 12
    assert y.tolist() == [[12.0, 12.0], [44.0, 44.0], [76.0, 76.0]]


def test_torchs_profiler_shows_regions_by_their_lines() -> None:
    x = torch.ones(6, 6)
    with fused_eager():
        step(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(x)
    names = [e.key for e in profile.key_averages() if e.key.startswith("fused_eager: ")]
    assert names and all("test_measuring.py:" in name for name in names)
