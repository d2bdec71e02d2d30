"""Explaining one call, and one program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from fused_eager import explain
from fused_eager.compiling import measuring
from fused_eager.log.events import LOG
from tests.streams import stable_shapes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def train(net: Net, x: torch.Tensor) -> torch.Tensor:
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach()


def test_each_line_with_its_ops_its_module_and_its_gradient() -> None:
    found = explain(train, Net(), torch.ones(4, 6))
    assert isinstance(found.result, torch.Tensor) and found.result.item() >= 0
    lines = {(line.rpartition(":")[2], module, backward): set(ops)
             for region in found.regions for line, module, backward, ops in region.lines}  # fmt: skip
    at = str(Net.forward.__code__.co_firstlineno + 1)
    assert "aten.tanh.default" in lines[at, "Net", False]
    assert "aten.addmm.default" in lines[at, "Net.inner", False]
    assert "aten.tanh_backward.default" in lines[at, "Net", True]
    assert "aten.mm.default" in lines[at, "Net.inner", True] or "aten.sum.dim_IntList" in lines[at, "Net.inner", True]
    text = str(found)
    assert "backward of it" in text and "[Net.inner]" in text and "return torch.tanh" in text


def test_a_second_call_compiles_nothing_and_still_shows_its_regions() -> None:
    net, x = Net(), torch.ones(3, 6)
    with stable_shapes():
        first, second = explain(net, x), explain(net, x)
    assert not second.compilations
    assert [r.ops for r in second.regions] == [r.ops for r in first.regions]
    assert second.regions[0].alone is not None, "regions are timed"


def test_nothing_stays_switched_on() -> None:
    before = list(LOG.sinks)
    explain(lambda: torch.ones(2) + 1)
    assert LOG.sinks == before and not LOG.detailed and not measuring.every_run


def test_exceptions_pass_through_and_clean_up() -> None:
    try:
        explain(lambda: 1 / 0)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("it was swallowed")
    assert not LOG.detailed


def test_the_command_runs_a_program_and_explains_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys, torch\nx = torch.ones(4) * 2.0\nprint(sys.argv[1:], x.sum().item())\n")
    command = [sys.executable, "-m", "fused_eager", "explain", str(script), "--flag", "a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--flag', 'a'] 8.0\n"
    assert "region 0 [xla]" in done.stderr and "program.py:2  x = torch.ones(4) * 2.0" in done.stderr
