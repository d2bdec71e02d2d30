"""Advice about collectives, from logs made by hand: each kind, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from fused_eager.reporting.advice import Advice
from fused_eager.reporting.reading import Process
from fused_eager.reporting.report import Report

from .logs import Log


def collective(log: Log, op: str = "allreduce_", site: str = "a.py:7", **more: Any) -> None:
    fields = {"group": "0", "sequence": 0, "bytes": 1 << 20, "ranks": 2, "seconds": 1e-3, "fetch_s": 0.0, "wait_s": 0.0}
    log.tell("collective", op=op, site=site, **{**fields, **more})


def loop(*each: dict[str, Any], rounds: int = 10) -> Log:
    """Rounds of training with these collectives."""
    log = Log()
    log.compile(1)
    log.plan(1)
    for _ in range(rounds):
        for more in each:
            collective(log, **more)
        log.flush("cut.optimizer")
    return log


def kinds(log: Log) -> list[str]:
    return [advice.kind for advice in log.report.advice]


def test_what_is_well_done_is_left_alone() -> None:
    assert kinds(loop({"seconds": 5e-3, "wait_s": 1e-3})) == []  # a bucket that overlaps
    assert kinds(loop({"bytes": 4, "wait_s": 1e-4})) == []  # the mean of a loss
    log = loop(rounds=50)
    for _ in range(2):  # before and after
        collective(log, "barrier", wait_s=1e-3)
    assert kinds(log) == []


@pytest.mark.parametrize(
    ("each", "kind", "cure"),
    [
        ([{"bytes": 64, "wait_s": 1e-3}] * 20, "collective.small", "torch.cat"),
        ([{"bytes": 4096 * n, "wait_s": 1e-3} for n in range(20)], "collective.parameters", "DistributedDataParallel"),
        ([{"seconds": 2e-3, "wait_s": 2e-3}], "collective.no-overlap", "async_op=True"),
        ([{"op": "barrier", "bytes": 1, "wait_s": 1e-3}], "collective.barrier", "leave it out"),
    ],
)
def test_each_kind_names_its_line_and_its_cure(each: list[dict[str, Any]], kind: str, cure: str) -> None:
    (found,) = loop(*each).report.advice
    assert found.kind == kind and cure in found.cure and found.site == "a.py:7" and found.seconds > 0


@pytest.mark.parametrize(
    ("detail", "kind", "cure"),
    [
        ("the reducer of DistributedDataParallel looks at gradients", "ddp.unused", "find_unused_parameters=False"),
        ("UntypedStorage.resize_", "fsdp.resize", "reshard_after_forward=False"),
    ],
)
def test_what_cuts_the_backward_pass_of_each_step(detail: str, kind: str, cure: str) -> None:
    log = loop()
    for _ in range(10 * (3 if kind == "fsdp.resize" else 1)):
        log.flush("sync.memory", "a.py:9", detail=detail)
    (found,) = [advice for advice in log.report.advice if advice.kind == kind]
    assert cure in found.cure and found.site == "a.py:9"
    few = loop(rounds=20)
    few.flush("sync.memory", "a.py:9", detail=detail)
    assert kinds(few) == []


def merged(*waits: list[float]) -> Report:
    """Of ranks that have been in the same collectives for so long."""
    processes = []
    for rank, of in enumerate(waits):
        log = loop(rounds=0)
        for number, seconds in enumerate(of):
            collective(log, sequence=number, seconds=seconds, wait_s=None, ranks=len(waits), bytes=1 << 20)
            log.flush("cut.optimizer")
        processes.append(Process({"pid": rank, "rank": rank, "v": 2}, log.events, "log", True))
    return Report.of(processes)


def late(*waits: list[float]) -> list[Advice]:
    return [advice for advice in merged(*waits).advice if advice.kind == "collective.late"]


def test_a_rank_that_is_always_last() -> None:
    (found,) = late([5e-3] * 20, [4e-3] * 20, [1e-4] * 20)
    assert found.title.startswith("rank 2 is last") and "20 of 20" in found.evidence
    assert found.seconds == pytest.approx(20 * 4.9e-3)
    assert late([5e-3, 1e-4] * 10, [1e-4, 5e-3] * 10) == []  # in turns
    assert late([5e-3] * 5, [1e-4] * 5) == []  # too few to say so
    assert late([5e-3] * 20) == []


def test_what_the_report_says_of_each() -> None:
    log = loop({"bytes": 1 << 20, "seconds": 4e-3, "wait_s": 1e-3, "fetch_s": 2e-3})
    text = str(log.report)
    assert "10 x allreduce_ at a.py:7 (2 ranks)" in text
    assert "1 MB in 4 ms (250 MB/s), fetching 2 ms, waiting 1 ms, overlap 75 %\n" in f"{text}\n"
    # Where C++ waits nobody knows for how long; by how much one is later than another takes the logs of all.
    assert "1 MB in 3 ms (333 MB/s), fetching 0 s, skew 4 ms\n" in str(merged([5e-3] * 4, [1e-3] * 4)) + "\n"
    assert "skew" not in str(loop({"group": "1", "ranks": 4}).report)


def test_the_report_says_how_many_collectives_ran_inside_of_regions() -> None:
    log = loop({})
    assert "inside of regions" not in str(log.report)
    for together in (True, True, False):
        log.tell("agreement", collectives=3, together=together, wait_s=0.002, site="a.py:7")
    told = " ".join(str(log.report).split())
    assert "6 ran inside of regions, and 3 by themselves, where ranks differed to know that took 6 ms" in told
