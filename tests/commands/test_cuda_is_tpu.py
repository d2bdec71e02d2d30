"""`run --cuda-is-tpu`: a program that says "cuda" gets the device, and it is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AFTER = """
import torch
import fused_eager.tpu
from fused_eager.frontends.device.as_cuda import cuda_is

before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
others = torch.load, torch.nn.Module.cuda, torch.amp.GradScaler.__init__, torch.autocast.__init__
with cuda_is("tpu"):
    assert torch.cuda.is_available() and torch.ones(2, device="cuda").device.type == "tpu"
    try:
        with cuda_is("tpu"):
            raise KeyError
    except KeyError:
        pass
    assert torch.ones(2, device="cuda").is_cuda
assert not [n for n, was in before.items() if getattr(torch.cuda, n) is not was]
assert others == (torch.load, torch.nn.Module.cuda, torch.amp.GradScaler.__init__, torch.autocast.__init__)
assert not torch.ones(2, device="tpu").is_cuda
"""


def test_a_program_for_cuda_runs_on_the_device() -> None:
    program = str(Path(__file__).with_name("cuda_program.py"))
    command = [sys.executable, "-m", "fused_eager", "run", "--cuda-is-tpu", program, "tpu:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["no graphs", "all of it"]
    assert "cuda is tpu in this process (--cuda-is-tpu)" in done.stderr


def test_afterwards_all_names_are_torchs_own() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
