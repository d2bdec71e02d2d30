"""No public function of torch's ends the process, hangs or fails an assertion inside torch on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import public
from .public_calls import Call, Made


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.public", *arguments],
        cwd=public.ROOT,
        env=dict(os.environ, FUSED_EAGER_PROGRESS="0", FUSED_EAGER_CACHE_DIR=str(folder), **environment),
        capture_output=True,
        text=True,
        timeout=3000,
    )


def test_some_functions_called_on_the_device(tmp_path: Path) -> None:
    done = run(tmp_path, "--calls", "3", "--one-in", "23")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def test_some_functions_called_in_a_context(tmp_path: Path) -> None:
    names = "Tensor.add,Tensor.tolist,meshgrid,bucketize,hann_window,Tensor.index_add_,nn.functional.nll_loss"
    done = run(tmp_path, "--calls", "6", "--context", "strict", "--names", names)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "strict", "debug"])
def test_every_function_called_on_the_device(mode: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--calls", "12", FUSED_EAGER_MODE=mode)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_a_call_that_ends_the_process_is_told_by_its_name_and_the_others_are_made(tmp_path: Path) -> None:
    done = run(tmp_path, "--names", "Tensor.add,Tensor.sub", "--calls", "2", FUZZ_END_AT="Tensor.add 1")
    assert done.returncode == 1 and "CRASH Tensor.add 1" in done.stdout
    assert "2 functions, 4 calls" in done.stdout


def test_what_is_wrong_is_told_apart() -> None:
    made = Made((2,), public.torch.float32, "dense", False, 0)
    assert public.differs([made.on("cpu")], [made.on("cpu")]) == ""
    assert "instead of" in public.differs([made.on("cpu")], [made.on("cpu") + 1])
    assert "instead of" in public.differs(1.5, 2.5) and "instead of" in public.differs(1, None)
    assert Call("add", (made, made), ()).arguments("cpu")[0][0] is not None
