"""torchtitan's own trainer on the device, FSDP2 within tensor parallel on four ranks, and a plain loop on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.client_programs import titan_files

ROOT = Path(__file__).resolve().parent.parent.parent
LOOP = Path(__file__).parent / "titan_loop.py"
STEPS = 50
CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tokenizer"

[metrics]
disable_color_printing = true
log_freq = 1

[optimizer]
lr = 8e-4

[lr_scheduler]
warmup_steps = 2

[training]
dataset = "c4_test"
local_batch_size = 2
seq_len = 64

[checkpoint]
enable = true
interval = 1000
"""

BESIDE = Path(sys.prefix) / "beside" / "torchtitan"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BESIDE.is_dir(), reason="torchtitan not installed; make test-clients installs it"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where torchtitan runs: its debug model's configuration, a tokenizer and texts."""
    titan_files(tmp_path)
    (tmp_path / "debug.toml").write_text(CONFIG)
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_EAGER_")}
    own = {"FUSED_EAGER_CACHE_DIR": str(folder / "cache"), "FUSED_EAGER_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
    apart = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(BESIDE)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env={**kept, **own, **apart}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def trainer(folder: Path, ranks: int, *options: str) -> str:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}", "--local-ranks-filter", "0")
    train = ("-m", "fused_eager", "run", "--device", "tpu", "-m", "torchtitan.train")
    return run(folder, *start, "--tee", "3", *train, "--job.config_file", "debug.toml", *options)


def test_the_trainer_learns_on_the_device_what_a_loop_learns_on_the_cpu(folder: Path) -> None:
    trainer(folder, 1, "--checkpoint.create_seed_checkpoint")
    exact = ("--training.steps", f"{STEPS}", "--training.mixed_precision_param", "float32")
    said = trainer(folder, 4, *exact, "--parallelism.tensor_parallel_degree", "2")
    found = [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([0-9.]+)", said)]
    seed = folder / "outputs" / "checkpoint" / "step-0"
    plain = run(folder, str(LOOP), "debug.toml", str(seed), "2", *exact)
    expected = [float(loss) for loss in re.findall(r"^loss: ([0-9.]+)", plain, re.MULTILINE)]
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0] - 1
    assert re.search(r"memory: +0\.0[1-9]GiB", said), said[-2000:]
