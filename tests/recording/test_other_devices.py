"""What lies on a device that is not fused goes to torch at once, and the report says so. `meta` stands for all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fused_eager import IslandRefused, expect, follower, fused_eager, report
from fused_eager.errors import BudgetExceeded
from fused_eager.follower import build
from fused_eager.log.events import LOG
from fused_eager.recording import other_devices
from tests.streams import forget_pending, open_stream

FOLLOWERS = ["python", pytest.param("compiled", marks=pytest.mark.skipif(bool(build.obstacle()), reason="no compiler"))]
X = torch.ones(4, 4, device="meta")


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget_pending()
    LOG.clear()


def count() -> int:
    return report().facts.on_other_devices.get("meta", 0)


@pytest.mark.parametrize("who", FOLLOWERS)
@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_each_op_is_counted_once(mode: str, who: str) -> None:
    with fused_eager(mode=mode, follower=who):
        for _ in range(100):
            y = torch.mm(X, X) + 1.5
            torch._foreach_add_([y, y], 1.0)
        assert count() == 300
        torch.mm(X, X)
    assert count() == 301
    LOG.clear()
    with fused_eager(mode=mode, follower=who):
        torch.mm(X, X)
    assert count() == 1
    assert y.is_meta and y.shape == (4, 4)
    assert "1 op ran natively on meta, which is not fused" in str(report())


@pytest.mark.parametrize("who", FOLLOWERS)
def test_what_is_pending_stays_so(who: str) -> None:
    with fused_eager(follower=who):
        pending = torch.ones(3) * 2
        for _ in range(3):
            torch.mm(X, X)
            torch.cat([X, X]).mul_(2).uniform_()
        assert len(open_stream().nodes) == 2
        # One on the host and one elsewhere: torch says what is wrong, as in eager, and nothing is lost.
        with pytest.raises(RuntimeError, match="on device meta is not on the expected device cpu"):
            torch.ones(4, 4) * 2 + X
        assert pending.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.skipif(bool(build.obstacle()), reason=build.obstacle() or "it can be built")
def test_where_there_is_a_compiled_follower_they_do_not_reach_python() -> None:
    with fused_eager(follower="compiled"):
        torch.mm(X, X)
        before = follower.ways()
        for _ in range(10):
            torch.mm(X, X).relu_()
        python, aten, followed = (b - a for a, b in zip(before, follower.ways(), strict=True))
    assert (python, aten, followed) == (0, 20, 0)


@pytest.mark.parametrize("who", FOLLOWERS)
def test_each_is_told_with_its_line_to_whoever_listens(who: str) -> None:
    with pytest.raises(BudgetExceeded) as raised, expect(max_islands=3), fused_eager(follower=who):
        for _ in range(4):
            torch.mm(X, X)
    assert "4 ops ran natively; allowed: 3" in str(raised.value)
    assert "test_other_devices.py:" in str(raised.value) and "meta is not fused" in str(raised.value)


@pytest.mark.parametrize("who", FOLLOWERS)
def test_whoever_begins_to_listen_hears_of_what_has_come_before(who: str) -> None:
    with fused_eager(follower=who):
        torch.mm(X, X)
        with pytest.raises(BudgetExceeded, match="1 op ran natively"), expect(max_islands=0):
            torch.mm(X, X)
    assert count() == 2


@pytest.mark.parametrize("who", FOLLOWERS)
def test_they_are_refused_where_islands_are(who: str) -> None:
    with (
        fused_eager(follower=who, islands="refuse"),
        pytest.raises(IslandRefused, match=r"mm.*test_other_devices\.py:.*meta"),
    ):
        torch.mm(X, X)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
@pytest.mark.parametrize(
    "pins",
    [
        lambda: (torch.ones(3) * 2).pin_memory(),
        lambda: torch.zeros(3, pin_memory=True),
        lambda: torch.full((3,), 2.0, pin_memory=True),
    ],
)
def test_memory_that_cannot_be_pinned_is_refused_as_in_eager(pins: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError) as plain:
        pins()
    with fused_eager():
        kept = torch.ones(3) + 1
        with pytest.raises(RuntimeError) as here:
            pins()
        assert not (kept * 2).is_pinned() and not torch.ops.aten.is_pinned(kept)
    assert str(here.value) == str(plain.value) and kept.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is nothing to pin memory for")
def test_what_is_pinned_stays_so() -> None:
    with fused_eager():
        x = (torch.ones(1 << 18) * 2).pin_memory()
        z = torch.zeros(3, pin_memory=True)
        for _ in range(3):
            x.add_(1)
        there = x.to(torch.accelerator.current_accelerator(), non_blocking=True)
        assert x.is_pinned() and z.is_pinned() and (there.cpu() * 2).sum().item() == 10 * (1 << 18)


def test_debug_mode_finds_no_nan_where_there_are_no_values() -> None:
    with fused_eager(mode="debug", check_nan=True):
        assert torch.mm(X, X).is_meta
    assert count() == 1


def test_debug_mode_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    with fused_eager(mode="debug"):
        torch.mm(X, X)
    assert waited == [torch.device("meta")]
    waited.clear()
    other_devices.wait("cpu")
    assert not waited
