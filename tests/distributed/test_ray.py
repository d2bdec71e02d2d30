"""Ray Train's `TorchTrainer` on a local Ray of two workers, as the example starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = ["--layers", "1", "--dim", "16", "--batch", "2", "--seq", "16", "--sample", "0"]


def has_ray() -> bool:
    found = importlib.util.find_spec("ray")
    return found is not None and all(importlib.util.find_spec(name) for name in ("pandas", "pyarrow"))


@pytest.mark.services
@pytest.mark.skipif(not has_ray(), reason="ray is not installed: pip install 'ray[train]'")
def test_two_workers_train_and_report(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    own = {"FUSED_EAGER_CACHE_DIR": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    # Workers import torch and JAX, on a machine that tests, and Ray would give them what nobody else wants of it. What
    # is looked at is how they start, and not what they fuse.
    own |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_worker_niceness": "0", "FUSED_EAGER_MODE": "off"}
    command = [sys.executable, "examples/ray_gpt.py", "--workers", "2", "--storage", str(tmp_path / "results")]
    out = subprocess.run(
        [*command, "--steps", "4", *SIZES],
        cwd=ROOT, env={**kept, **own}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-4000:]
    said = json.loads(next(line for line in out.stdout.splitlines()[::-1] if line.startswith("{")))
    assert said["backend"] == "fused_eager" and said["workers"] == 2 and said["device"].startswith("tpu")
    assert 0 < said["loss"] < said["first"] < 10
