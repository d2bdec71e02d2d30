"""Free memory: what needs more than there is at once runs in ATen, op by op, and the report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.devices.host import free
from fused_eager.errors import IslandRefused
from tests.streams import events


def test_the_least_of_what_is_left_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    (tmp_path / "cgroup").write_text("1:cpu:/x\n0::/a/b\n")
    for group, limit in (("a", "3000000"), ("a/b", "max")):
        (tmp_path / "fs" / group).mkdir(parents=True)
        (tmp_path / "fs" / group / "memory.max").write_text(limit)
        (tmp_path / "fs" / group / "memory.current").write_text("2500000")
        (tmp_path / "fs" / group / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    monkeypatch.setattr(free, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(free, "_MOUNT", tmp_path / "fs")
    assert free.free() == 600_000
    assert free.lacks(600_000) == 600_000 and free.lacks(500_000) is None
    (tmp_path / "cgroup").unlink()
    assert free.free() == 5000 << 10
    (tmp_path / "meminfo").unlink()
    assert free.free() is None and free.lacks(1 << 60) is None


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free, "ASKED", 1 << 10)
    monkeypatch.setattr(free, "free", lambda: 1 << 12)


def program() -> torch.Tensor:
    x = torch.linspace(-1, 1, 5000)
    x.mul_(2)
    return (x.sin() + x).median() + x[torch.tensor([3, 4999])]


@pytest.mark.parametrize("options", [{}, {"mode": "strict"}, {"mode": "debug"}], ids=str)
def test_a_region_that_does_not_fit_runs_in_aten(full: None, options: dict[str, Any]) -> None:
    expected = program()
    with events("island") as seen, fused_eager(**options):
        for _ in range(3):
            assert torch.equal(program(), expected)
    assert "GB are free" in str([e.data for e in seen])


def test_a_warm_process_knows_it_as_well(full: None, tmp_path: Path) -> None:
    from fused_eager.executing.load import forget

    with fused_eager(cache="", cache_dir=str(tmp_path), cache_bytes=1 << 30):
        program().sum().item()
    forget()  # which is what a second process knows
    with events("island", "cache-load") as seen, fused_eager(cache="", cache_dir=str(tmp_path), cache_bytes=1 << 30):
        program().sum().item()
    assert {e.kind for e in seen} == {"island", "cache-load"}


def test_who_refuses_islands_is_told(full: None) -> None:
    with fused_eager(islands="refuse"):
        y = torch.linspace(-1, 1, 5000).sin()
        with pytest.raises(IslandRefused, match="GB are free"):
            y.sum().item()


def test_small_regions_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free, "free", lambda: pytest.fail("asked"))
    with fused_eager():
        assert torch.linspace(-1, 1, 5000).sin().sum().item() == pytest.approx(0, abs=1e-3)
