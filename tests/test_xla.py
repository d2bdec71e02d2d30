"""The device of regions is JAX's CPU, whatever the program's own default is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax
jax.config.update("jax_default_device", jax.devices("cpu")[1])
import torch
from fused_eager import fused_eager, xla
from fused_eager.log.events import LOG

x = torch.linspace(-3, 3, 1000)
table, at = torch.randn(10, 4), torch.tensor([1, 9, 3])
def program():
    y = torch.special.ndtri(torch.sigmoid(x)) * 2 + torch.linspace(0, 1, 1000)
    picked = torch.nn.functional.embedding(at, table).cumsum(0)
    return y.sort().values.sum().item(), torch.linalg.inv(torch.eye(4) + picked.T @ picked).sum().item()
plain = program()
with fused_eager(compile="wait", native="never"):
    fused = [program() for _ in range(3)]
assert all(abs(a - b) < 1e-3 for each in fused for a, b in zip(plain, each)), (plain, fused)
assert xla.device() is jax.devices("cpu")[0] and len(jax.devices("cpu")) == 2
counts = LOG.counts
assert counts["compile"] and not counts["compile-failed"], counts
assert jax.numpy.zeros(1).devices() == {jax.devices("cpu")[1]}
print("as in eager")
"""


def test_the_default_device_of_the_program_s_own_jax_code_is_its_own() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300,
        env={**os.environ, "XLA_FLAGS": flags, "FUSED_EAGER_CACHE": "off"}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "as in eager\n"), done.stderr
