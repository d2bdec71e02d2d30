"""What a program meets is noted with its key for the target, and how often; without values nothing is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from fused_eager.cache import Key
from fused_eager.fusion_rules.lowering import NoLowering

from fused_eager import fused_eager
from fused_eager.bounded import Bounded
from fused_eager.compiling import compile as compiling
from fused_eager.compiling import met
from fused_eager.compiling.met import Meetings, Met, Op, meeting
from fused_eager.devices.accelerator import Accelerator, AcceleratorBuffer, unpaged
from fused_eager.devices.host.device import HOST
from fused_eager.executing import load
from fused_eager.targets.device import TargetDevice
from fused_eager.targets.target import Target
from tests.streams import lowered_by, recorded


class Here(TargetDevice):
    """A target that XLA can lower for without its compiler."""

    @property
    def xla(self) -> Any:
        return jax.devices("cpu")[0]


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meetings]:
    monkeypatch.setattr(compiling, "MEMORY", Bounded(64))
    monkeypatch.setattr(load, "ISLANDS", {})
    found = Meetings(Here(Target.parse("v5e:1")), "salt")
    with meeting(found):
        yield found


def test_regions_are_noted_with_their_lines_and_how_often_they_ran(meetings: Meetings) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
    for step in range(3):
        meetings.step = step
        with fused_eager():
            layer(torch.ones(7, 3)).sum().item()
    (only,) = meetings.found.values()
    assert only.key is not None and only.key.parts["salt"] == "salt" and only.key.parts["memory"] == "device"
    assert only.runs == {0: 1, 1: 1, 2: 1} and not only.why
    assert {op.module for op in only.ops} == {"Sequential.0", "Sequential.1", ""}
    assert all(__file__ in op.line for op in only.ops)


def test_what_the_target_has_no_lowering_for_is_an_island_here_as_it_is_there(meetings: Meetings) -> None:
    def refuse(cx: Any, *args: Any, **kwargs: Any) -> Any:
        raise NoLowering("not there")

    with lowered_by("aten.cosh.default", refuse), fused_eager():
        assert torch.ones(9).mul(2).cosh().add(1).sum().isfinite().item()
    assert [m.why for m in meetings.found.values() if m.why] == ["not there"]
    assert sum(m.runs.total() for m in meetings.found.values() if not m.why) >= 1


def test_a_stand_in_plans_as_the_target_would_and_not_for_the_heap_of_the_host(meetings: Meetings) -> None:
    device = Accelerator("tpu", 0, jax.devices("cpu")[0])
    assert meetings.device.housekeeping.room is None and device.housekeeping.room is None
    assert device.layered_from > HOST.layered_from
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "is_a_target", False)
        assert device.housekeeping.room == HOST.housekeeping.room and device.layered_from == HOST.layered_from
    assert HOST.housekeeping.room is not None


def test_without_values_a_region_returns_zeros_that_take_no_memory() -> None:
    region = recorded(lambda: torch.ones(1 << 14, 1 << 14).relu() + 1)
    before = _resident()
    (out,), flags = met._without_values(region, HOST).call()
    assert out.shape == (1 << 14, 1 << 14) and not np.asarray(flags).any() and float(out[5, 7]) == 0
    assert _resident() - before < 1 << 28


def test_without_values_what_nobody_has_written_takes_no_memory_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "is_valueless", True)
    device = Accelerator("tpu", 0, jax.devices("cpu")[0])
    t = torch.zeros(1)
    buffer = AcceleratorBuffer(t.untyped_storage(), device, (torch.float32, (1 << 14, 1 << 14)))
    before = _resident()
    buffer.lift()
    assert buffer.array is not None and buffer.array.shape == (1 << 14, 1 << 14) and float(buffer.array[5, 7]) == 0
    assert _resident() - before < 1 << 28


def test_values_of_a_few_megabytes_take_none_either_where_such_memory_was_freed_before() -> None:
    # After that the C library hands out cleared memory of its own, which has pages.
    freed = [np.ones(30 << 20, np.uint8) for _ in range(3)]
    del freed
    before = _resident()
    held = [unpaged((torch.bfloat16, (2048, 2048)), HOST.xla) for _ in range(100)]
    assert all(float(each[5, 7]) == 0 for each in held)
    assert _resident() - before < 1 << 27


def test_an_empty_value_has_no_memory_to_take() -> None:
    assert unpaged((torch.float32, (0, 3)), HOST.xla).shape == (0, 3)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = [
        Met(Key({"region": [1, 2]}), "a", [Op("aten::add", "x.py:3", "Net.0")], Counter({0: 1, 2: 3}), 512),
        Met(None, "b", why="no form"),
    ]
    met.write(found, tmp_path / "met", steps=3)
    assert met.read(tmp_path / "met") == (found, {"steps": 3})
