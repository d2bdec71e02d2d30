"""Configurations for devices that are no CPU: forecast for a target, measured on a device, found again by kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fused_eager import pallas_op
from fused_eager.frontends.kernels import tuning
from fused_eager.targets.device import STOOD_FOR, TargetDevice
from fused_eager.targets.target import Target

from .test_pallas import _scaled, run

Tensor = torch.Tensor
V5E = TargetDevice(Target.parse("v5e:2x2"))


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A compiler that expects more of programs that it is asked for later, and refuses the second."""
    asked: list[tuple[int, ...]] = []

    def seconds(self: tuning.Run) -> float:
        asked.append(tuple(self.operands[0].shape))
        if len(asked) == 2:
            raise RuntimeError("too much memory")
        return {1: 3.0, 3: 1.0, 4: 2.0}.get(len(asked), 9.0)

    monkeypatch.setattr(tuning.Run, "_expected", seconds)
    monkeypatch.setattr(tuning.Run, "keys", lambda *_: [])
    return asked


def test_the_configuration_of_which_least_is_expected_is_taken(expected: list[tuple[int, ...]]) -> None:
    @pallas_op("tuning_tests::forecast", configs=[{"block": b} for b in (8, 16, 3, 4)])
    def forecast(x: Tensor, y: Tensor, block: int = 2) -> Tensor:
        return _scaled(x, y, block)  # blocks of 3 do not reach the last row

    x, y = torch.randn(16, 4), torch.randn(16, 4)
    found = forecast.forecast(x, y, target="v5e:2x2")
    assert (dict(found.config), dict(found.seconds)) == ({"block": 4}, {0: 3.0, 3: 2.0})
    assert forecast.forecast(x * 2, y, target="v5e:2x2") is found and len(expected) == 4
    # What the device stands for a target of takes it, and nothing is measured.
    STOOD_FOR.append(V5E)
    try:
        assert forecast._tuned((x, y), {}, V5E) is found
    finally:
        STOOD_FOR.pop()


FORECAST = """
import sys, torch
import fused_eager.tpu
from tests.frontends.kernels import test_pallas as t
from fused_eager import pallas_op
from fused_eager.compiling.caching import keeper
from fused_eager.config import resolve
from fused_eager.targets.device import STOOD_FOR, TargetDevice
from fused_eager.targets.target import Target
@pallas_op("tuning_tests::kept", configs=[{"block": 8}, {"block": 64}, {"block": 512}])
def kept(x: torch.Tensor, y: torch.Tensor, block: int = 4) -> torch.Tensor:
    return t._scaled(x, y, block)
x = torch.ones(512, 8192)
if sys.argv[1:]:
    STOOD_FOR.append(TargetDevice(Target.parse("v5e:2x2")))
    kept(x.to("tpu"), x.to("tpu"))
    (found,) = kept.tuned.values()
else:
    found = kept.forecast(x, x, target="v5e:2x2")
keeper(resolve()).flush()
print(found.remembered, dict(found.config), found.seconds)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, XLA's compiler for TPUs, is not there")
def test_what_was_forecast_is_found_by_who_runs_for_that_target(tmp_path: Path) -> None:
    told = []
    for argument in ([], ["there"]):
        program = f"import sys; sys.argv = {['', *argument]!r}\n{FORECAST}"
        told.append(run(program, XDG_CACHE_HOME=str(tmp_path), JAX_PLATFORMS="cpu").strip().split("\n")[-1])
    remembered, _, found = zip(*[t.partition(" ") for t in told], strict=True)
    assert remembered == ("False", "True") and found[0] == found[1]
    assert "'block': 64" in found[0] and "2:" not in found[0]  # so large a block is refused
