"""Sharded checkpoints: saved by so many ranks, loaded by others; and a rank that is killed in the middle of a save."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_faults import check_fine, check_lost, run

MODULE = "tests.distributed.checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "loads"), [(("tpu", 4), ("cpu", 2)), (("cpu", 2), ("tpu", 3))], ids=str)
def test_another_number_of_ranks_on_another_device(
    saves: tuple[str, int], loads: tuple[str, int], tmp_path: Path
) -> None:
    for name, (door, world) in (("save", saves), ("load", loads)):
        (result,) = run([(name, door)], world, 5.0, MODULE, CHECKPOINTS=str(tmp_path))
        check_fine(result)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["cpu", "tpu"])
def test_a_rank_that_is_killed_in_a_save_leaves_the_former_one_whole(door: str, tmp_path: Path) -> None:
    (killed,) = run([("kill_in_a_save", door)], 3, 5.0, MODULE, CHECKPOINTS=str(tmp_path))
    check_lost(killed, 5, line="tests/distributed/checkpoints.py:")
    assert not (tmp_path / "step-2" / ".metadata").exists()
    (after,) = run([("load_after_it", "cpu")], 2, 5.0, MODULE, CHECKPOINTS=str(tmp_path))
    check_fine(after)
