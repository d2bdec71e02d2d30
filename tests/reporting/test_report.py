"""The report is a view of the event log."""

from __future__ import annotations

import sys

import pytest

from fused_eager import report
from fused_eager.log.events import EventLog
from fused_eager.log.reasons import CODES, Reason
from fused_eager.log.site import Site
from fused_eager.reporting import report as module
from fused_eager.reporting.reading import from_memory
from fused_eager.reporting.report import Report

from .logs import Log


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> EventLog:
    """A log of our own."""
    log = EventLog(kept=50)
    monkeypatch.setattr(module, "LOG", log)
    return log


def test_of_nothing(own: EventLog) -> None:
    found = report()
    assert (found.ops, found.regions, found.compilations, found.flushes, found.islands) == (0, 0, 0, {}, {})
    assert found.advice == ()
    assert "0 ops" in str(found)


def test_it_looks_at_the_log_of_this_process(own: EventLog) -> None:
    for event in _two_rounds().events:
        own.emit(event.kind, **event.data)
    found = report()
    assert (found.ops, found.regions) == (6, 2)
    assert (found.compilations, found.compile_seconds) == (1, 0.5)


def _two_rounds() -> Log:
    log = Log()
    log.compile(1)
    log.plan(1)
    log.flush()
    log.flush()
    return log


def test_sums() -> None:
    log = _two_rounds()
    log.flush("sync.value", ops=5, plan=1)
    log.island()
    found = log.report
    assert (found.ops, found.regions) == (11, 3)
    assert found.flushes == {"cut.backward": 2, "sync.value": 1}
    assert found.islands == {"aten.sort.default": "no lowering (a.py:3)"}


def test_of_a_long_run_the_times_are_whole_although_events_are_gone(own: EventLog) -> None:
    whole = EventLog()
    log = Log()
    log.plan(1)
    for _ in range(200):
        log.flush("sync.value", host=5e-4)
        log.sync(seconds=1.3e-3)
        log.tell("bypass", turns=2, seconds=3e-4, site="a.py:1", reason="")
    for event in log.events:
        for one in (own, whole):
            one._keep(event)
    found, expected = report().facts, Report.of([from_memory(whole.events, whole.began)]).facts
    assert found.forgotten == 150 and not expected.forgotten
    assert (found.ops, found.flushes, found.turns) == (expected.ops, expected.flushes, expected.turns)
    for name in ("seconds", "host", "launch", "wait", "bypassed", "meanwhile"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.02), name
    assert found.steps == pytest.approx(expected.steps, rel=0.02)
    assert "the last 150 of them in 50 regions" in str(report()) and "of the last 50 flushes" in str(report())


def test_the_text_is_one_screen_and_begins_with_what_to_change() -> None:
    log = _two_rounds()
    for i in range(30):
        log.flush()
        log.sync(seconds=2e-3, site=f"a.py:{i % 3}")
        log.island(op=f"aten.op{i}.default")
        log.compile(1, "ops", site=f"b.py:{i}")
    text = str(log.report)
    lines = text.splitlines()
    assert len(lines) <= 48 and max(map(len, lines)) <= 120
    assert text.index("What to change") < text.index("Where work was cut")
    assert " 1. a.py:" in text and "Cure: " in text and "Seen: " in text


def test_a_run_without_fault_says_so() -> None:
    assert "Nothing to change" in str(_two_rounds().report)


def test_the_way_that_was_faster_is_told_where_it_was_measured() -> None:
    log = Log()
    log.flush()
    log.tell("choice", site="a.py:7", native=False, fused_s=0.1, native_s=0.3)
    log.tell("choice", site="a.py:7", native=True, fused_s=0.3, native_s=0.1)
    found = log.report
    assert found.choices == {"a.py:7": "native"}
    assert "native  from a.py:7 to the next read: 300 ms fused, 100 ms natively" in str(found)
    assert "The faster way, measured" in found.html() and "remembered" not in str(found)


def test_a_way_that_another_process_measured_is_told_as_such() -> None:
    log = Log()
    log.flush()
    log.tell("choice", site="a.py:7", native=True, fused_s=0.3, native_s=0.1, remembered=True)
    assert "300 ms fused, 100 ms natively (remembered)" in str(log.report)
    assert "before, by another process" in log.report.html()


def test_what_the_compile_cache_does_not_keep_is_told_with_the_reason() -> None:
    log = Log()
    assert "not kept" not in str(log.report)
    log.tell("cache-refused", region="3 ops from a.py:1", detail="nothing is known of it")
    assert "not kept: 1 region, which the next process will have to compile again; 3 ops" in str(log.report)
    assert "nothing is known of it" in str(log.report)


def test_a_compile_cache_that_cannot_be_used_is_told_with_the_first_cause_and_the_cure() -> None:
    log = Log()
    log.tell("cache-write-failed", key="k", tier="local", code="breaker-open", detail="local is left alone")
    for detail in ("io: /c is not a folder", "another one"):  # of two processes
        log.tell("cache-unusable", folder="/c", code="io", detail=detail)
    (line,) = [line for line in str(log.report).splitlines() if "not kept" in line]
    assert "the compile cache cannot be used in /c: io: /c is not a folder; " in line
    assert "cache_dir (FUSED_EAGER_CACHE_DIR)" in line and "left alone" not in line
    log = Log()
    log.tell("cache-off", detail="no home")
    assert "the compile cache cannot be used: no home; " in str(log.report)


def test_entries_that_a_store_does_not_take_are_told_with_the_first_cause() -> None:
    log = Log()
    for code in ("breaker-open", "unreachable", "timeout"):
        log.tell("cache-write-failed", key="k", tier="redis://h", code=code, detail=f"{code}: so")
    log.tell("cache-write-failed", key="k", tier="local", code="full", detail="full: quite")
    text = str(log.report)
    assert "not kept: 3 entries in the cache's store redis://h: unreachable: so\n" in text
    assert "not kept: 1 entry in the cache's store local: full: quite" in text


def test_a_log_that_ends_while_compiling_says_what() -> None:
    log = _two_rounds()
    log.tell("compiling", region="12 ops from train.py:3")
    assert "the log ends while compiling 12 ops from train.py:3" in str(log.report)


def test_old_events_make_room_and_rare_ones_stay(own: EventLog) -> None:
    for event in _two_rounds().events[:2]:
        own.emit(event.kind, **event.data)
    flush = _two_rounds().events[-1]
    for _ in range(200):
        own.emit(flush.kind, **flush.data)
    found = report()
    assert found.compilations == 1 and found.flushes == {"cut.backward": 50}
    assert own.counts["flush"] == 200


def test_every_code_used_anywhere_is_explained() -> None:
    for code, row in CODES.items():
        assert code == row.name and row.meaning and row.hint


def test_a_reason_is_one_of_the_codes() -> None:
    with pytest.raises(KeyError, match=r"sync\.value"):
        Reason("sync.valeu")
    text = str(Reason("region.size", "1024 ops", Site("a.py", 3, "f")))
    assert text == f"region.size: {CODES['region.size'].meaning} (1024 ops) at a.py:3"


def _calls(rounds: int) -> int:
    """How many functions are called, and generators resumed, to report on a long run with everything in it."""
    log, count = Log(), 0
    for i in range(rounds):
        here = f"a.py:{i % (rounds // 4) + 1}"
        cause = ("first", "shape", "liveness", "ops", "argument")[i % 5]
        log.compile(i, cause, site=here, changes=[["a shape", i, i + 1]] if i % 5 else [], skeleton=i % 7)
        ended_by = ("cut.backward", "region.unstable")[i % 2]
        log.plan(i, (here, "net", False, {"aten.add.Tensor": 3}), (f"b.py:{i}", "", True, {}), ended_by=ended_by)
        log.island(f"aten.op{i % 50}.default", site=here)
        log.flush(site=here, plan=i)
        log.sync("sync.island", site=here, detail=f"aten.op{i % 50}.default: no lowering")

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        str(log.report)
        log.report.html()
    finally:
        sys.setprofile(None)
    return count


def test_the_work_of_a_report_grows_with_the_log_and_no_faster() -> None:
    _calls(40)  # what is imported and made once
    assert _calls(400) < 2.5 * _calls(200)
