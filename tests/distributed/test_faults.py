"""A rank is lost: the others raise within the heartbeat's time, and name it. `pytest -m slow` runs every case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# No rank is lost.
FINE = (
    *("nothing", "slow", "slow_compile", "cache_removed", "disk_full", "a_job_before", "leave_in_order"),
    "store_removed",
)
LOST = (
    *("kill", "stop", "leave", "end_early", "throw", "kill_in_backward", "stop_in_backward", "store_gone"),
    *("kill_while_it_compiles", "stop_while_it_compiles"),
    *("store_stopped", "stop_while_it_is_received_from", "stop_before_a_barrier", "stop_before_a_new_group"),
)
DOORS = ("cpu", "tpu")
INSIDE_XLA = ("xla", "regions")  # collectives of the device are launched, and XLA waits for the others
AT_THE_END = 120  # of a process that learns at its end that its collectives have failed
EXIT_CODE = 13  # of a wait that nothing could interrupt


def run(
    cases: list[tuple[str, str]], world: int, heartbeat: float, module: str = "tests.distributed.faults", **given: str
) -> list[dict[str, Any]]:
    task = json.dumps({"world": world, "heartbeat": heartbeat, "cases": cases})
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    out = subprocess.run(
        [sys.executable, "-m", module, task],
        cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1", **given}, capture_output=True, text=True,
        timeout=360 * len(cases),
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(out.stdout.splitlines()[-1])
    return found


def check_lost(
    result: dict[str, Any],
    heartbeat: float,
    uninterrupted: bool = False,
    line: str = "tests/distributed/faults.py:",
) -> None:
    """Each other rank has raised in time, an error that names the rank and its own line, and has ended."""
    victim = result["victim"]
    for rank, (code, text) in enumerate(zip(result["codes"], result["errors"], strict=True)):
        if rank == victim:
            continue
        codes = (EXIT_CODE,) if uninterrupted else (1,)
        if result["door"] in INSIDE_XLA:  # it may have launched all, or wait for XLA, which nothing interrupts
            codes = 1, AT_THE_END, EXIT_CODE
        assert code in codes, f"rank {rank} ended with {code}:\n{text}"
        assert f"rank {victim} " in text and "a wrong number" not in text, text
        assert "RankLost" in text or code == EXIT_CODE, text
        assert line in text and "docs/how_to/a_rank_died.md" in text, text
    seconds = result["ended"] if uninterrupted or result["seconds"] is None else result["seconds"]
    # Beside the heartbeat: the beat that was last heard, and machines that do other things as well.
    assert seconds < 2 * heartbeat + 5, f"it took {seconds} s"


def check_fine(result: dict[str, Any]) -> None:
    assert set(result["codes"]) == {0}, result["errors"]
    assert all(said[-1] == "done" for said in result["said"]), result["said"]


def check_differ(result: dict[str, Any]) -> None:
    # On the device a rank may have called all that it calls, and learn of it at its end.
    ends = ["raised" if said[-1] == "raised" else "at the end" for said in result["said"]]
    assert result["codes"] == [1 if end == "raised" else AT_THE_END for end in ends], result["errors"]
    lines = [at for at, line in enumerate(Path(ROOT, "tests/distributed/faults.py").read_text().splitlines(), 1)
             if "dist.all_reduce(torch.ones(100" in line]  # fmt: skip
    for text in result["errors"]:
        assert "CollectivesDiffer" in text and "SUM" in text and "MAX" in text, text
        assert all(f"faults.py:{line}" in text for line in lines), text
    # Where nobody but the victim has raised, all others have learned of it at their ends.
    assert result["seconds"] < 2 if result["seconds"] is not None else set(ends) == {"raised", "at the end"}
    assert result["ended"] < 20


def test_a_rank_that_is_stopped_and_one_that_strays() -> None:
    stopped, differ = run([("stop", "tpu"), ("differ", "cpu")], 2, 2.0)
    check_lost(stopped, 2)
    assert "is stopped" in stopped["errors"][0] and "waiting for rank 1" in stopped["errors"][0]
    assert "(in all_reduce at " in stopped["errors"][0], "as the program names it, and not what waits"
    check_differ(differ)


def test_nobody_waits_for_what_a_lost_rank_compiles() -> None:
    """The others are in a collective whose operand it was to compile: they compile it, and learn that it is lost."""
    for result in run([("kill_while_it_compiles", "tpu"), ("stop_while_it_compiles", "tpu")], 2, 2.0):
        check_lost(result, 2)
        assert result["ended"] < 2 * 2 + 10, f"it took {result['ended']} s to end"


def test_a_rank_is_lost_while_xla_waits_for_it() -> None:
    """It is stopped before a collective, and killed before the first one, for which XLA makes its connections."""
    cases = [("stop_in_backward", "xla"), ("kill_while_it_compiles", "xla"), ("stop_in_backward", "regions")]
    for result in run(cases, 3, 2.0):
        check_lost(result, 2)
        assert result["ended"] < 2 * 2 + 10, f"it took {result['ended']} s to end"


@pytest.mark.slow
@pytest.mark.parametrize("door", [*DOORS, *INSIDE_XLA])
def test_each_fault(door: str) -> None:
    for result in run([(name, door) for name in LOST], 4, 3.0):
        check_lost(result, 3, uninterrupted=result["name"] == "stop_before_a_new_group" and door == "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("door", [*DOORS, *INSIDE_XLA])
def test_what_is_no_fault(door: str) -> None:
    results = {result["name"]: result for result in run([(name, door) for name in FINE], 4, 3.0)}
    for result in results.values():
        check_fine(result)
        assert "aborts" not in "".join(result["errors"])
    for name, words in (("slow", "at "), ("slow_compile", "compiling 41 ops from train.py:7")):
        assert all(f"waiting for rank 2, {words}" in results[name]["errors"][rank] for rank in (0, 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_the_others_go_on_in_a_group_of_their_own(door: str) -> None:
    (result,) = run([("go_on_without_it", door)], 4, 3.0)
    assert [code for rank, code in enumerate(result["codes"]) if rank != 2] == [0, 0, 0], result["errors"]
    assert all(said[-1] == "done" for rank, said in enumerate(result["said"]) if rank != 2), result["said"]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_collectives_that_differ(door: str) -> None:
    for result in run([("differ", door)] * 3, 4, 3.0):
        check_differ(result)


@pytest.mark.slow
def test_a_rank_that_never_arrives() -> None:
    missing = run([("never_arrive", "tpu")], 4, 3.0)[0]
    assert [code for rank, code in enumerate(missing["codes"]) if rank != 2] == [1, 1, 1]
    assert all("rank 2 has not come to make" in missing["errors"][rank] for rank in (0, 1, 3)), missing["errors"]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_a_last_collective_that_nobody_waits_for(door: str) -> None:
    pending = run([("a_pending_collective_at_the_end", door)], 4, 3.0)[0]
    assert [code for rank, code in enumerate(pending["codes"]) if rank != 2] == [AT_THE_END] * 3, pending["errors"]
    assert all("RankLost: rank 2 is lost" in pending["errors"][rank] for rank in (0, 1, 3)), pending["errors"]


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_a_hundred_faults(door: str) -> None:
    """0 hangs, 0 wrong numbers, each error names the rank."""
    kinds = ("kill", "stop", "leave", "throw", "kill_in_backward", "stop_in_backward", "store_gone", "end_early")
    for _ in range(6):
        for result in run([(name, door) for name in kinds], 4, 2.0):
            check_lost(result, 2)
    for result in run([(name, door) for name in ("slow_compile", "cache_removed", "disk_full")], 4, 2.0):
        check_fine(result)


@pytest.mark.slow
@pytest.mark.parametrize("door", [*DOORS, *INSIDE_XLA])
def test_torchrun_starts_the_ranks_again(door: str, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    given = {"FUSED_EAGER_CACHE_DIR": str(tmp_path / "cache"), "FUSED_EAGER_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    given["FUSED_EAGER_COLLECTIVES"] = door if door in INSIDE_XLA else "host"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    out = subprocess.run(
        [sys.executable, *command, "-m", "tests.distributed.restarted", str(tmp_path), door],
        cwd=ROOT, env={**kept, **given}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-4000:]
    total = float(sum(2 * step + 1 for step in range(6)))
    for rank in range(2):
        assert (tmp_path / f"{rank}.1").read_text() == f"3 {[total] * 4}"
