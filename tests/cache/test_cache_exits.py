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


@pytest.mark.parametrize(("way", "code"), [("returns", 120), ("ends", 120), ("raises", 1), ("has its code", 7)])
@pytest.mark.parametrize("start", ["fork", "spawn", "alone"])
def test_a_process_that_fails_at_its_end(start: str, way: str, code: int) -> None:
    """The error is told, all else is done, and the code is not 0; whoever has another error or code keeps that."""
    out = subprocess.run(
        [sys.executable, "-m", "tests.cache.exits", start, f"fails, {way}"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert [line.split()[0] for line in out.stdout.splitlines()] == ["second", "first"], out.stderr
    assert ("OSError: the last of it was lost" in out.stderr) == (code == 120)
    assert out.returncode == code
