"""What is done at the end of a process is done once, last come first, in processes of every kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("way", "error"),
    [("returns", "None"), ("ends", "None"), ("raises", "ValueError('bad data')"), ("leaves", "KeyError('bad key')")],
)
@pytest.mark.parametrize("start", ["fork", "spawn", "alone"])
def test_the_end_of_a_process(start: str, way: str, error: str) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "tests.cache.exits", start, way],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if start == "alone":
        error = "None"  # Python's own hook sees it
    assert out.stdout.splitlines() == [f"second {error}", f"first {error}"], out.stderr
    assert out.returncode == (1 if way in ("raises", "leaves") else 0)
