"""The page for those who come from Lightning: what it shows runs, and a wrong choice is told of."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "examples" / "lightning_digits.py"
lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning not installed; make test-clients installs it"
)


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_EAGER_")}
    kept |= {"FUSED_EAGER_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, str(file)]
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300)


def test_the_page_shows_the_script() -> None:
    assert SCRIPT.read_text() in (ROOT / "docs" / "how_to" / "lightning.md").read_text()


@lightning
def test_the_script_trains_on_the_device(tmp_path: Path) -> None:
    done = run(SCRIPT.read_text(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained on tpu:0: accuracy 1.00" in done.stdout


@lightning
def test_the_second_device_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace("max_epochs=3", "max_epochs=1, devices=[1]")
    done = run(script, tmp_path, FUSED_EAGER_DEVICES="2")
    assert "trained on tpu:1" in done.stdout, done.stderr


@lightning
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ('accelerator="fused_eager"', "Say strategy='fused_eager'"),
        ('accelerator="fused_eager", strategy="fused_eager", devices=2', "say strategy='fused_eager_ddp'"),
        ('accelerator="fused_eager", strategy="fused_eager", devices=-1', "2 devices are a strategy of their own"),
        ('accelerator="fused_eager", strategy="fused_eager", devices=-2', "how many, or a list"),
    ],
)
def test_what_would_train_elsewhere_is_refused(asked: str, told: str, tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace('accelerator="fused_eager", strategy="fused_eager"', asked)
    done = run(script, tmp_path, FUSED_EAGER_DEVICES="2")
    assert done.returncode and told in done.stderr


@lightning
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace('strategy="fused_eager"', 'strategy="fused_eager_ddp", devices=2')
    script += "print('weights', sum(p.double().sum().item() for p in trainer.model.parameters()))\n"
    done = run(script, tmp_path, FUSED_EAGER_DEVICES="2")
    assert done.returncode == 0, done.stderr
    weights = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert len(weights) == 2 and len(set(weights)) == 1, done.stdout
