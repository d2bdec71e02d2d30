"""The report is a view of the event log."""

from __future__ import annotations

import pytest

from fused_eager import events, report, reporting
from fused_eager.events import EventLog
from fused_eager.reasons import CODES, Reason
from fused_eager.site import Site


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> EventLog:
    """A log of our own."""
    own = EventLog()
    monkeypatch.setattr(reporting, "LOG", own)
    return own


def flush(log: EventLog, reason: str, ops: int = 3, regions: int = 1) -> None:
    log.emit("flush", reason=reason, detail="", ops=ops, regions=regions)


def test_of_nothing(log: EventLog) -> None:
    found = report()
    assert (found.ops, found.regions, found.compilations, found.flushes, found.islands) == (0, 0, 0, {}, {})
    assert str(found).startswith("0 ops")


def test_sums(log: EventLog) -> None:
    flush(log, "sync.value", ops=10, regions=2)
    flush(log, "sync.value", ops=5)
    flush(log, "cut.backward", ops=7)
    log.emit("compile", region="10 ops from a.py:1", seconds=0.5, ops=10)
    log.emit("compile", region="7 ops from a.py:9", seconds=0.25, ops=7)
    log.emit("island", op="aten.sort.default", reason="no lowering", site="a.py:3")
    found = report()
    assert (found.ops, found.regions) == (22, 4)
    assert (found.compilations, found.compile_seconds) == (2, 0.75)
    assert found.flushes == {"sync.value": 2, "cut.backward": 1}
    assert found.regions_compiled == ("10 ops from a.py:1", "7 ops from a.py:9")
    assert found.islands == {"aten.sort.default": "no lowering (a.py:3)"}


def test_the_text_has_each_fact_with_its_meaning_and_hint(log: EventLog) -> None:
    flush(log, "cut.backward")
    for _ in range(3):
        flush(log, "sync.value")
    log.emit("island", op="aten.sort.default", reason="no lowering", site="a.py:3")
    text = str(report())
    assert CODES["sync.value"].meaning in text and CODES["sync.value"].hint in text
    assert text.index("3 x sync.value") < text.index("1 x cut.backward"), "the most frequent first"
    assert "island aten.sort.default: no lowering (a.py:3)" in text


def test_totals_do_not_shrink_when_events_are_dropped(log: EventLog) -> None:
    kept = log.events.maxlen
    assert kept is not None
    log.emit("compile", region="r", seconds=1.0, ops=2)
    for _ in range(kept + 10):
        flush(log, "mode.single", ops=1)
    found = report()
    assert found.compilations == 1
    assert found.compile_seconds == 1.0
    assert found.ops == found.regions == kept + 10
    assert found.flushes == {"mode.single": kept + 10}


def test_clear_starts_a_new_report(log: EventLog) -> None:
    flush(log, "sync.value")
    log.clear()
    assert report().ops == 0


def test_every_code_used_anywhere_is_explained() -> None:
    for code, row in CODES.items():
        assert code == row.name and row.meaning and row.hint


def test_a_reason_is_one_of_the_codes() -> None:
    with pytest.raises(KeyError, match=r"sync\.value"):
        Reason("sync.valeu")
    text = str(Reason("region.size", "1024 ops", Site("a.py", 3, "f")))
    assert text == f"region.size: {CODES['region.size'].meaning} (1024 ops) at a.py:3"


def test_the_report_looks_at_the_one_log() -> None:
    assert reporting.LOG is events.LOG
