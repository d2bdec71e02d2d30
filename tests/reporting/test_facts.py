"""Adding up an event log."""

from __future__ import annotations

import pytest

from fused_eager.reporting.facts import add_up
from fused_eager.reporting.text import fused_line

from .logs import Log


def test_times_do_not_overlap() -> None:
    log = Log()
    log.flush(host=1.0, seconds=3.0, compiling=2.0)
    log.tell("compile", region="r", ops=1, seconds=2.0, cause="first", why="", site="a.py:1", module="", changes=[],
             skeleton=1, variant=1)  # fmt: skip
    log.at += 1.5
    log.sync(seconds=4.6, compiling=2.0)  # the flush happened on the way: 3.0 of its 4.6 seconds
    f = add_up([log.process])
    assert (f.host, f.launch, f.compile) == (1.0, 1.0, 2.0)
    assert f.wait == pytest.approx(1.6)


def test_what_aten_ran_as_it_was_recorded_is_no_launching() -> None:
    log = Log()
    log.flush(seconds=3.0, native=2.5)
    log.tell("bypass", turn="step", turns=3, seconds=1.0, reason="region.native")
    log.tell("bypass", turn="step", turns=2, seconds=0.5, reason="region.new")
    f = add_up([log.process])
    assert (f.launch, f.meanwhile, f.bypassed) == (0.5, 3.0, 1.0)
    assert (f.turns, f.waiting) == (5, 2)
    assert fused_line(f).endswith(
        "5 of 6 rounds ran on torch alone, unrecorded, 3 as that is faster, 2 as nothing was compiled for them"
    )


def test_a_flush_before_the_wait_is_not_part_of_it() -> None:
    log = Log()
    log.flush(seconds=0.5)
    log.at += 10.0
    log.sync(seconds=0.25)
    assert add_up([log.process]).wait == pytest.approx(0.25)


def test_rows_are_kept_by_reason_and_line() -> None:
    log = Log()
    for seconds in (0.001, 0.003):
        log.sync(site="a.py:2", seconds=seconds)
    log.sync(site="a.py:9")
    f = add_up([log.process])
    assert [(s.site, s.count) for s in f.syncs] == [("a.py:2", 2), ("a.py:9", 1)]
    assert f.syncs[0].longest == pytest.approx(0.003) and f.syncs[0].waited == pytest.approx(0.004)


def test_runs_are_counted_by_executable_for_plans_share_them() -> None:
    log = Log()
    log.compile(1)
    log.plan(1)
    log.flush(plan=1)
    log.plan(2, code=1, name="region 1")
    log.flush(plan=2)
    log.flush(plan=2)
    f = add_up([log.process])
    assert [c.runs for c in f.compiles] == [3]
    assert [r.count for r in f.regions] == [1, 2]


def test_times_of_regions_are_medians_of_samples_and_shared_by_lines() -> None:
    log = Log()
    log.plan(1, ("a.py:1", "Net.fc", False, {"aten.mm.default": 1}), ("a.py:2", "", True, {"aten.mul.Tensor": 3}))
    for _ in range(10):
        log.flush(plan=1)
    for seconds in (4.0, 1.0, 2.0):
        log.tell("run", plan=1, region=0, how="xla", seconds=seconds)
    f = add_up([log.process])
    region = f.regions[0]
    assert (region.alone, region.total) == (2.0, 20.0)
    assert (f.lines["a.py:1"].device, f.lines["a.py:2"].device) == (5.0, 15.0)
    assert (f.lines["a.py:1"].backward, f.lines["a.py:2"].backward) == (0, 3)
    assert f.modules == {"Net.fc": (10, 5.0)}


def test_without_samples_there_is_no_time() -> None:
    log = Log()
    log.plan(1)
    log.flush()
    assert add_up([log.process]).regions[0].total is None


def test_rounds_are_optimizer_steps_if_there_are_any() -> None:
    log = Log()
    for i in range(12):
        log.flush("cut.backward")
        if i % 4 == 3:
            log.flush("cut.optimizer")
    assert add_up([log.process]).steps == 3
    assert add_up([Log().process]).steps == 0


def test_processes_keep_their_plans_apart() -> None:
    a, b = Log(), Log()
    a.plan(1)
    b.plan(1, ("b.py:1", "", False, {"aten.mul.Tensor": 1}))
    a.flush(plan=1)
    b.flush(plan=1)
    b.flush(plan=1)
    f = add_up([a.process, b.process])
    assert [(r.lines[0][0], r.count) for r in f.regions] == [("a.py:1", 1), ("b.py:1", 2)]
    assert f.ops == 9


def test_unknown_kinds_and_fields_are_passed_over() -> None:
    log = Log()
    log.tell("something-new", x=1)
    log.flush(more="than is known")
    assert add_up([log.process]).flushes == 1
