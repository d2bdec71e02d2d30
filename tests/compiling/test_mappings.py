"""Executables take memory mappings, of which a process may have only so many."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.compiling import mappings
from fused_eager.executing import load
from tests.streams import events, stable_shapes

OPS = (torch.sin, torch.exp, torch.tanh, torch.neg, torch.abs)


def programs(start: int, count: int) -> list[float]:
    """So many programs of different ops."""
    out = []
    for n in range(start, start + count):
        y, k = torch.linspace(0, 1, 6).view(2, 3), n
        for _ in range(5):
            y, k = OPS[k % 5](y) * 0.5, k // 5
            y = y.softmax(-1)
        out.append(y.square().sum().item())
    return out


def held() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says how many there are")
def test_executables_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "max_map_count"
    limit.write_text(str(int((held() + 150) / mappings.SHARE)))
    monkeypatch.setattr(mappings, "_LIMIT", limit)
    monkeypatch.setattr(mappings, "_calls", itertools.count(1))
    expected = programs(0, 16)
    before = held()
    with stable_shapes(), events("forgotten") as seen, fused_eager(mode="fused"):
        got = programs(0, 16)
        assert got == pytest.approx(expected, rel=1e-5)
        assert seen and seen[0].data["maps"] > before
        assert held() < before + 2000
        assert programs(0, 3) == pytest.approx(expected[:3], rel=1e-5)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says how many there are")
def test_what_is_forgotten_is_gone_at_once() -> None:
    with stable_shapes(), fused_eager(mode="fused"):
        programs(0, 1)
        before = held()
        programs(1, 7)
        grown = held() - before
        load.forget()
        gc.collect()
        assert grown > 100 and held() < before + 0.2 * grown


def test_where_nobody_counts_nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mappings, "_LIMIT", tmp_path / "absent")
    assert [mappings.crowded() for _ in range(2 * mappings.EVERY)] == [None] * 2 * mappings.EVERY
