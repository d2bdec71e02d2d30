"""torch's profiler sees a device's ops where the CPU's would be, the regions that they ran in, and the program's frames
alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fused_eager import profiled

from .compare import TPU


def steps(device: Any, **options: Any) -> Any:
    """What a profiler sees of two steps of training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(6, 8).to(device), torch.arange(6).to(device) % 5

    def step() -> float:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        step()
        step()
    assert not (profiled.on or profiled.is_hidden() or profiled._thread.is_suspended)
    return seen.profiler


def names(seen: Any) -> list[str]:
    return [e.name() for e in seen.kineto_results.events()]


def test_a_profiler_sees_each_op_once_and_the_regions() -> None:
    wanted, found = (Counter(names(steps(device))) for device in ("cpu", TPU))
    ops = "addmm", "gelu", "native_layer_norm", "_log_softmax", "nll_loss_backward", "gelu_backward", "mm"
    assert [found[f"aten::{op}"] for op in ops] == [wanted[f"aten::{op}"] for op in ops]
    assert {n: c for n, c in found.items() if "Backward0" in n} == {n: c for n, c in wanted.items() if "Backward0" in n}
    assert any(name.startswith("fused_eager: ") for name in found)


def test_an_op_that_aten_runs_is_seen_once() -> None:
    x = torch.eye(3).to(TPU)
    torch.linalg.eigvals(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.linalg.eigvals(x)
    assert names(seen.profiler).count("aten::_linalg_eigvals") == 1


@pytest.mark.skipif(profiled._suspend is None, reason="Python 3.10 has no call for it")
def test_frames_are_the_programs_and_few_of_the_librarys() -> None:
    ours = [name for name in names(steps(TPU, with_stack=True)) if ".py(" in name]
    assert any("torch/nn/modules/linear.py" in name for name in ours)
    inside = [f"fused_eager/{part}" for part in ("planning/", "lowering/", "executing/arguments", "executing/validate")]
    assert not [name for name in ours if any(part in name for part in inside)]
