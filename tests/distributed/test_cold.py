"""A job whose cache is empty compiles each region once, whichever rank does it; and what its ranks' logs say of it."""

from __future__ import annotations

import collections
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fused_eager.reporting import perfetto, reading
from fused_eager.reporting.report import Report

from .cold import STEPS

ROOT = Path(__file__).parents[2]


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def job(door: str, world: int, folder: Path, **options: str) -> list[reading.Process]:
    """The logs of the ranks of one job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_") or k == "FUSED_EAGER_FOLLOWER"}
    (folder / "cache").mkdir(mode=0o700, exist_ok=True)
    given = {
        "FUSED_EAGER_CACHE_DIR": str(folder / "cache"), "FUSED_EAGER_REPORT": str(folder / "log"),
        "FUSED_EAGER_PROGRESS": "0", "FUSED_EAGER_DEVICES": "1", "FUSED_EAGER_NATIVE": "never", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": str(world), **options,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.distributed.cold", door]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**kept, **given, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            _, wrote = rank.communicate(timeout=400)
            assert rank.returncode == 0, wrote[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return reading.read(folder / "log")


def counts(logs: list[reading.Process]) -> collections.Counter[str]:
    return collections.Counter(e.kind for log in logs for e in log.events)


def met(logs: list[reading.Process]) -> dict[tuple[str, int], list[Any]]:
    """The collectives, each as all ranks have told of it."""
    found = collections.defaultdict(list)
    for log in logs:
        for e in log.events:
            if e.kind == "collective":
                found[e.data["group"], e.data["sequence"]].append((log, e))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("door", ["context", "device"])
@pytest.mark.parametrize("world", [2, 4])
def test_each_region_is_compiled_once_in_the_whole_job(door: str, world: int, tmp_path: Path) -> None:
    logs = job(door, world, tmp_path, FUSED_EAGER_COMPILE="wait")
    assert [log.name for log in logs] == [f"rank {rank}" for rank in range(world)]
    keys = {e.data["key"] for log in logs for e in log.events if e.kind == "region"}
    cold = counts(logs)
    refused = len({e.data["region"] for log in logs for e in log.events if e.kind == "cache-refused"})
    assert cold["compile"] - cold["cache-refused"] + refused == len(keys) > 3
    # No rank waits for another in turn: each has compiled some of them, as it came to them first.
    assert cold["cache-load"] >= (world - 1) * len(keys) / 2
    for log in logs:
        (tmp_path / ("log" if log.name == "rank 0" else f"log.{log.name.replace(' ', '')}")).unlink()
    warm = counts(job(door, world, tmp_path, FUSED_EAGER_COMPILE="wait"))
    assert warm["compile"] == cold["cache-refused"]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["context", "device"])
def test_the_ranks_report_and_trace(door: str, tmp_path: Path) -> None:
    logs = job(door, 2, tmp_path, FUSED_EAGER_COMPILE="wait")
    report = Report.of(logs)
    # Of the reducer, at the line of the backward pass, and of the program's own.
    rows = [row for row in report.facts.collectives.values() if "tests/distributed/cold.py:" in row.site]
    own = [row for row in rows if row.op == "allreduce_" and row.bytes == row.count * 4 * 64]
    assert [row.count for row in own] == [2 * STEPS] and own[0].ranks == 2
    assert sum(row.count for row in rows) >= 2 * STEPS * 3
    text = str(report)
    assert "Collectives (how often" in text and "skew" in text
    complete = [of for of in met(logs).values() if len(of) == 2]
    assert len(complete) >= 3 * STEPS
    # Rank 1 is late in each step, and rank 0 waits for it in what comes first.
    skews = [found.skew for found in report.facts.met.values() if found.skew is not None]
    assert sum(skew > 0.2 for skew in skews) >= STEPS - 1
    trace = perfetto.trace(logs)["traceEvents"]
    names = [row["args"]["name"] for row in trace if row["name"] == "process_name"]
    assert [name.partition(" (")[0] for name in names] == ["rank 0", "rank 1"]
    for of in complete:
        # One clock for both: a collective ends at the same time, but for what a busy machine adds.
        ends = [log.wall + e.time for log, e in of]
        assert max(ends) - min(ends) < 2.0, (of[0][1].data, ends)
        number = of[0][1].data["sequence"]
        assert {row["pid"] for row in trace if row["ph"] == "b" and row["args"]["sequence"] == number} == {0, 1}
