"""Compiling for a TPU by XLA's own compiler for it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fused_eager.targets import topology

needs_its_compiler = pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")

_GIVEN = """
import jax
from fused_eager.compiling.compile import tracing_for
from fused_eager.fusion_rules import families
from fused_eager.targets.device import TargetDevice
from fused_eager.targets.target import Target
families.load()
device = TargetDevice(Target.parse("v5e:2x2"))
place = jax.sharding.SingleDeviceSharding(device.xla)
def count_kernels(function, *forms):
    with tracing_for(device):
        made = jax.jit(function).lower(*forms).compile()
    print(made.as_text().count('custom_call_target="tpu_custom_call"'))
"""


def kernels_in(program: str) -> list[str]:
    """What a program prints that compiles for a v5e: for each `count_kernels(function, *forms)`, how many kernels there
    are; `place` is the sharding of its forms."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    done = subprocess.run(
        [sys.executable, "-c", _GIVEN + program],
        env={**inherited, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()
