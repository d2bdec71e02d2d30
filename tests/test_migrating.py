"""Coming from elsewhere: each page shows its scripts, and they run, before and after."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "migrating").glob("*.md"))
# How a script runs that was written for something else; None: what it needs cannot be installed beside this torch.
BEFORE: dict[str, list[str] | None] = {
    "cuda": ["-m", "fused_eager", "run", "--cuda-is-tpu"],
    "torchtpu": ["-m", "fused_eager", "run", "--device", "tpu"],
    "torch_compile": [],
    "torch_xla": None,
    "torchax": None,
}


def run(script: Path, folder: Path, how: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_EAGER_")}
    command = [sys.executable, *how, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thinned(5)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_its_scripts_and_the_new_one_runs(page: Path, tmp_path: Path) -> None:
    scripts = [ROOT / "examples" / "migrating" / f"{page.stem}_{when}.py" for when in ("before", "after")]
    shown = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert shown == [script.read_text() for script in scripts]
    compile(shown[0], str(scripts[0]), "exec")
    after = run(scripts[1], tmp_path, [])
    assert "loss" in after or "epoch 1: " in after
    how = BEFORE[page.stem]
    if how:
        assert run(scripts[0], tmp_path, how) == after


@pytest.mark.slow
def test_the_script_under_inductor_prints_the_same(tmp_path: Path) -> None:
    scripts = [ROOT / "examples" / "migrating" / f"torch_compile_{when}.py" for when in ("before", "after")]
    assert run(scripts[0], tmp_path, []) == run(scripts[1], tmp_path, [])


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert len(PAGES) == len(BEFORE)
    assert [page.name for page in PAGES if f"migrating/{page.name}" not in navigation] == []
