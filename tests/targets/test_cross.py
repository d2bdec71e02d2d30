"""Regions compiled for a TPU by XLA's real compiler, each set in a process of its own: libtpu is large, and stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fused_eager.compiling.cross import judged
from fused_eager.targets import topology
from fused_eager.targets.target import Target

needs_libtpu = pytest.mark.skipif(bool(topology.obstacle()), reason=topology.obstacle() or "it is there")
PROLOGUE = """
import json, jax, torch
from fused_eager.compiling.cross import cross_compile
from fused_eager.targets.device import TargetDevice
from fused_eager.targets.target import Target
from tests.streams import recorded
"""


def child(program: str, prologue: str = PROLOGUE, **environment: str) -> tuple[Any, str]:
    """What a program prints last, as JSON, and its stderr."""
    # Not those that JAX sets where it finds no TPU.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    done = subprocess.run(
        [sys.executable, "-c", prologue + program],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@needs_libtpu
def test_a_region_becomes_an_entry_quietly_and_leaves_nothing_behind(tmp_path: Path) -> None:
    program = """
device = TargetDevice(Target.parse("v5e:2x2"))
made = cross_compile(recorded(lambda: torch.relu(torch.ones(512, 256) @ torch.ones(256, 1024))), True, device)
print(json.dumps([len(made.blobs["executable"]), json.loads(made.blobs["about"])["checks"], made.cost.flops,
                  made.cost.seconds, made.cost.unjudged, made.cost.memory, device.xla.device_kind]))
"""
    (size, checks, flops, seconds, unjudged, memory, kind), told = child(program, TMPDIR=str(tmp_path))
    assert size > 10_000 and checks == [] and kind == "TPU v5 lite" and told == ""
    assert 2 * 512 * 256 * 1024 <= flops < 3 * 512 * 256 * 1024
    assert 0 < seconds < 1e-3 and unjudged < 5 and 4 * 512 * 1024 <= memory < 1 << 23
    assert not [name for name in os.listdir(tmp_path) if "tpu" in name]


@needs_libtpu
def test_each_generation_and_results_in_the_order_that_it_gives_their_shape() -> None:
    # A narrow matrix lies by columns on a TPU.
    texts = ["v4:2x2x1", "v5e:1", "v5p:2x2x2", "v6e:8", "tpu7x:2x2x1"]
    program = f"""
found = []
for text in {texts!r}:
    device = TargetDevice(Target.parse(text))
    made = cross_compile(recorded(lambda: torch.ones(1000, 3).softmax(-1)), True, device)
    found.append([device.xla.device_kind, sorted(made.blobs)])
print(json.dumps(found))
"""
    found, told = child(program)
    kinds = [Target.parse(text).chip.kind for text in texts]
    assert found == [[kind, ["about", "executable"]] for kind in kinds] and told == ""


@needs_libtpu
def test_a_program_without_a_target_starts_quietly_beside_it(tmp_path: Path) -> None:
    # JAX looks for a TPU as it starts, and loads libtpu for that.
    program = """
import json, os, fused_eager, torch
fused_eager.register("tpu")
print(json.dumps([(torch.ones(3, device="tpu") * 2).sum().item(), os.environ.get("TPU_LOG_DIR")]))
"""
    found, told = child(program, "", JAX_PLATFORMS="", TMPDIR=str(tmp_path), FUSED_EAGER_CACHE="off")
    assert found == [6.0, "disabled"] and told == "tpu: 1 device, simulated by the CPU\n"
    assert not [name for name in os.listdir(tmp_path) if "tpu" in name]


@needs_libtpu
def test_two_processes_compile_at_once() -> None:
    program = PROLOGUE + """
cross_compile(recorded(lambda: torch.ones(64, 64) @ torch.ones(64, 64)), True, TargetDevice(Target.parse("v5e:2x2")))
"""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen([sys.executable, "-c", program], env=environ) for _ in range(2)
    ]
    assert [each.wait(timeout=300) for each in both] == [0, 0]


@pytest.mark.parametrize(
    ("optimal", "seconds", "unjudged"),
    [(0.25, 0.25, 0), (-2.75, 0.25, 3), (0.0, 0.0, 0), (-3.0, 0.0, 3), (float("nan"), 0.0, 0)],
)
def test_instructions_without_an_estimate_are_counted(optimal: float, seconds: float, unjudged: int) -> None:
    assert judged(optimal) == (seconds, unjudged)
