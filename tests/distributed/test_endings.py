"""What `multiprocessing` started ends in order: a rank does its part before, and what it has raised is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from fused_eager.config import resolve
from fused_eager.ranks.faults import Fault
from fused_eager.ranks.heartbeat import Heartbeat

ROOT = Path(__file__).parents[2]
STARTS = (pytest.param("fork"), pytest.param("spawn", marks=pytest.mark.slow))


def found(way: str, start: str, folder: Path) -> tuple[str, str, str]:
    """What rank 0 has found, both exit codes, and what was said."""
    given = {"FUSED_EAGER_HEARTBEAT": "2", "FUSED_EAGER_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-m", "tests.distributed.endings", way, start, str(folder)],
        cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return (folder / "found").read_text(), out.stdout.splitlines()[-1], out.stderr


@pytest.mark.parametrize("start", STARTS)
def test_a_rank_that_ends_without_looking_at_its_last_result(start: str, tmp_path: Path) -> None:
    result, codes, said = found("unread", start, tmp_path)
    assert result == str([3.0] * 10)
    assert codes == "[0, 0]" and "lost" not in said


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_rank_whose_last_collective_fails_does_not_end_with_0(start: str, tmp_path: Path) -> None:
    _, codes, said = found("lost", start, tmp_path)
    assert codes == "[120, 7]", said
    # It waits at its end, unless it has been told before.
    assert re.search("RankLost: rank 1 is lost.* Rank 0 (waits in all_reduce|has come to its end)", said)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_rank_that_raises(start: str, tmp_path: Path) -> None:
    result, codes, _ = found("raise", start, tmp_path)
    assert "rank 1 has raised ValueError: the data of this rank are broken" in result and "endings.py:" in result
    assert codes == "[0, 1]"  # rank 0 has caught that, and has gone on to its end


def test_an_error_that_nobody_need_look_at_tells_nobody(tmp_path: Path) -> None:
    beat = Heartbeat(distributed.FileStore(str(tmp_path / "store"), 2), 0, 2, resolve())
    assert not beat.is_untold
    beat.fail(Fault("gone", 1, "is lost"))
    beat.error("waits in a future", is_raised=False)
    assert beat.is_untold
    beat.error("waits in all_reduce")
    assert not beat.is_untold
