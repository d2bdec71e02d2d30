"""Free memory: what needs more than there is at once runs in ATen, op by op, and the report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fused_eager import fused_eager, sync
from fused_eager.devices.host import free
from fused_eager.errors import IslandRefused
from fused_eager.executing import deferred_checks, load, run
from fused_eager.tracing import trace
from tests.streams import all_lengths_large, events, flush_now


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
    monkeypatch.setattr(run, "LARGE", 1 << 10)
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


def wasteful() -> torch.Tensor:
    """The gradients of a volume and of positions in it: XLA gathers for all eight corners of each at once."""
    torch.manual_seed(0)
    image, grid = torch.rand(1, 3, 12, 12, 12), (torch.rand(1, 12, 12, 12, 3) * 2 - 1).requires_grad_()
    image.requires_grad_()
    torch.nn.functional.grid_sample(image, grid, align_corners=False).sum().backward()
    assert grid.grad is not None
    return grid.grad


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", [{}, {"mode": "strict"}, {"mode": "debug"}, {"compile": "auto"}], ids=str)
def test_a_region_that_takes_many_times_what_it_computes_runs_in_aten(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free, "ASKED", 1 << 10)
    load.forget()
    expected = wasteful()
    with events("island") as seen:
        for _ in range(4):
            with fused_eager(**options):
                torch.testing.assert_close(wasteful(), expected)
                sync(compiled=True)
    told = {e.data["op"]: e.data["reason"] for e in seen}
    assert "aten.grid_sampler_3d_backward.default" in told and "of which all values have 0 MB" in str(told)


def test_a_region_that_takes_little_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free, "ASKED", 1 << 10)
    load.forget()
    with events("island") as seen, fused_eager():
        x = torch.linspace(-1, 1, 5000)
        assert (x.sin() * x).sort()[0][0].item() == pytest.approx(0, abs=1e-3)
    assert not seen


class Token:
    """That of a region that runs until it is waited for."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        self.ready = True


@pytest.mark.parametrize("mode", ["fused", "strict"])
@pytest.mark.parametrize(("room", "waits"), [(80 << 20, True), (200 << 20, False)])
def test_what_is_under_way_counts(room: int, waits: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA takes the memory of a region when its turn comes: what is free as the next one is started does not tell."""
    monkeypatch.setattr(free, "ASKED", 1 << 20)
    monkeypatch.setattr(free, "free", lambda: room)
    token, x = Token(), torch.rand(2048, 2048)
    expected = (x * 2).exp()
    launch = deferred_checks.Launch([token], large=[(token, 64 << 20)])  # type: ignore[list-item]
    with events("island") as seen, fused_eager(mode=mode):
        run.DEFERRED.launches.append(launch)
        assert run.DEFERRED.under_way() == 64 << 20
        y = (x * 2).exp()
        flush_now()
        assert token.ready is waits
        run.wait()
        torch.testing.assert_close(y, expected)
    assert not seen and run.DEFERRED.under_way() == 0


def test_blocks_of_rows_count_what_all_of_them_return() -> None:
    with all_lengths_large(), events("lengths") as seen:
        for rows in (1000, 1100, 1200, 1300):
            with fused_eager():
                y = (torch.ones(rows, 8) * 2).tanh() + 1
                sync()
            torch.testing.assert_close(y, torch.full((rows, 8), 1.9640276))
        made = [r for step in trace.MEMORY.steps() for r in step.ready.values() if getattr(r, "varies", False)]
        sizes = {e.needs for r in made for e in r.executables if e is not None}
    assert [e.data["why"] for e in seen] == [""] and sizes
    assert all(size >= 1100 * 8 * 4 for size in sizes)


def test_who_refuses_islands_is_told(full: None) -> None:
    with fused_eager(islands="refuse"):
        y = torch.linspace(-1, 1, 5000).sin()
        with pytest.raises(IslandRefused, match="GB are free"):
            y.sum().item()


def test_small_regions_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free, "free", lambda: pytest.fail("asked"))
    with fused_eager():
        assert torch.linspace(-1, 1, 5000).sin().sum().item() == pytest.approx(0, abs=1e-3)
