"""A Triton kernel that is given tensors of the device says why it cannot run, eagerly and under torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .running import beside

KERNEL = """
import torch, triton
import triton.language as tl
from triton.runtime.driver import driver

@triton.jit
def double(x, out, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

def doubled(x):
    out = torch.empty_like(x)
    double[(1,)](x, out, x.numel(), block=128)
    return out
"""
EAGER = "doubled(torch.ones(100, device='tpu'))"
COMPILED = "torch.compile(doubled, backend='fused_eager')(torch.ones(100, device='tpu'))"
REGISTER = "import fused_eager; fused_eager.register('tpu')\n"


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if not (beside("triton") / "triton").is_dir():
        pytest.skip("triton not installed; make test-clients installs it")
    file = folder / "program.py"  # Triton reads a kernel's source
    file.write_text(program)
    paths = os.pathsep.join(filter(None, [str(beside("triton")), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths, "FUSED_EAGER_CACHE": "off"}
    return subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("call", [EAGER, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", ["fused", "strict", "debug"])
def test_a_kernel_on_the_device_is_refused_in_words(call: str, mode: str, tmp_path: Path) -> None:
    program = f"import os; os.environ['FUSED_EAGER_MODE'] = {mode!r}\n{REGISTER}{KERNEL}\n{call}\n"
    done = run(program, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "FusedEagerError: a Triton kernel cannot run on the device 'tpu'" in done.stderr
    assert "Write the kernel in Pallas or JAX (docs/kernels.md" in done.stderr
    assert "double[(1,)]" in done.stderr, "the user's line is not in the traceback"


def test_what_looks_whether_triton_has_a_driver_finds_none(tmp_path: Path) -> None:
    """Libraries ask in a `try`, and catch what Triton raises: a RuntimeError."""
    looked = "try:\n    driver.active\nexcept RuntimeError as error:\n    print('no driver:', type(error).__name__)\n"
    done = run(f"{REGISTER}{KERNEL}\n{looked}", tmp_path)
    assert done.stdout == "no driver: FusedEagerError\n", done.stderr


def test_a_process_without_the_device_has_tritons_own_error(tmp_path: Path) -> None:
    after = "import sys\nprint([m for m in sys.modules if m == 'jax' or m.startswith('fused_eager.frontends.device')])"
    done = run(f"{KERNEL}\n{after}\ndoubled(torch.ones(100))", tmp_path)
    assert done.stdout == "[]\n", done.stderr
    assert "0 active drivers" in done.stderr or "fused_eager" not in done.stderr
