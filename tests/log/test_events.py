"""The event log: bounded by kind, counted, told to sinks as it happens."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fused_eager.log.events import FRESH, LOG, OWED, Event, EventLog


def test_events_are_kept_in_order_and_counted() -> None:
    log = EventLog()
    log.emit("a", n=1)
    log.emit("b")
    log.emit("a", n=2)
    assert [e.data for e in log.of("a")] == [{"n": 1}, {"n": 2}]
    assert [e.kind for e in log.of("a", "b")] == ["a", "b", "a"]
    assert log.counts == {"a": 2, "b": 1}
    times = [e.time for e in log.events]
    assert times == sorted(times) and len(times) == 3


def test_each_kind_is_bounded_and_the_counts_are_not() -> None:
    log = EventLog(kept=10)
    log.emit("rare")
    for i in range(25):
        log.emit("a", n=i)
    assert [e.data["n"] for e in log.of("a")] == list(range(15, 25))
    assert log.counts["a"] == 25
    assert len(log.of("rare")) == 1, "many events of one kind push out none of another"


def test_numbers_are_summed_and_reasons_counted() -> None:
    log = EventLog(kept=2)
    for i in range(5):
        log.emit("a", n=i, seconds=0.5, good=True, reason="odd" if i % 2 else "even", text="x")
    log.emit("b", n=7)
    assert log.totals == {"a n": 10, "a seconds": 2.5, "b n": 7}
    assert log.counts == {"a": 5, "a for even": 3, "a for odd": 2, "b": 1}
    assert log.forgotten() == {"a": {"count": 3, "n": 3, "seconds": 1.5}}
    assert log.began < log.events[0].time
    log.clear()
    assert not log.totals and not log.counts and not log.forgotten() and not log.began


@pytest.mark.parametrize("told", [FRESH - 1, FRESH, 2 * FRESH + 3])
def test_sums_hold_whenever_they_are_asked_for(told: int) -> None:
    log = EventLog(kept=10)
    for n in range(told):
        log.emit("a", n=n, reason="even" if n % 2 == 0 else "odd")
        if n == FRESH // 2:
            assert log.totals["a n"] == sum(range(n + 1)) and log.counts["a"] == n + 1
    assert log.totals["a n"] == sum(range(told))
    assert log.counts == {"a": told, "a for even": (told + 1) // 2, "a for odd": told // 2}
    assert log.forgotten()["a"] == {"count": told - 10, "n": sum(range(told - 10))}


def test_count_keeps_no_event() -> None:
    log = EventLog()
    log.count("op", by=3)
    log.count("op")
    assert log.counts["op"] == 4 and not log.events


def test_sinks_get_each_event_at_once() -> None:
    log = EventLog()
    seen: list[Event] = []
    log.sinks.append(seen.append)
    log.emit("a")
    assert seen == log.events


def test_what_takes_long_to_find_out_is_found_out_when_somebody_reads() -> None:
    log, asked = EventLog(), []

    def find_out(n: int) -> dict[str, int]:
        asked.append(n)
        return {"n": n}

    log.emit_when_read("slow", lambda: find_out(1))
    log.emit("quick")
    log.emit_when_read("slow", lambda: find_out(2))
    assert not asked
    assert log.totals["slow n"] == 3 and asked == [1, 2]
    assert [(e.kind, e.data) for e in log.events] == [("slow", {"n": 1}), ("quick", {}), ("slow", {"n": 2})]
    assert asked == [1, 2]
    log.emit_when_read("slow", lambda: find_out(3))
    log.clear()
    assert not log.events and asked == [1, 2]


def test_a_sink_gets_it_at_once_and_nothing_from_before() -> None:
    log = EventLog()
    seen: list[Event] = []
    log.emit_when_read("a", lambda: {"n": 1})
    log.sinks.append(seen.append)
    log.emit_when_read("a", lambda: {"n": 2})
    assert [e.data for e in seen] == [{"n": 2}]
    assert [e.data for e in log.of("a")] == [{"n": 1}, {"n": 2}]


def test_what_nobody_reads_is_found_out_before_there_is_too_much_of_it() -> None:
    log, asked = EventLog(), []
    for n in range(OWED + 5):
        log.emit_when_read("a", lambda n=n: asked.append(n) or {})  # type: ignore[misc]
    assert asked == [0, 1, 2, 3, 4]


def test_clear_forgets_events_and_counts_but_no_sink() -> None:
    log = EventLog()
    log.sinks.append(lambda e: None)
    log.emit("a")
    log.clear()
    assert not log.events and not log.counts and len(log.sinks) == 1


def test_an_event_cannot_be_changed() -> None:
    event = Event("a", 0.0, {})
    with pytest.raises(AttributeError):
        event.kind = "b"  # type: ignore[misc]


def test_threads_lose_nothing_and_have_numbers() -> None:
    log = EventLog()

    def work() -> None:
        for _ in range(500):
            log.emit("a")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert log.counts["a"] == len(log.of("a")) == 2000
    assert len({e.thread for e in log.of("a")}) == 4


def test_a_child_can_tell_though_a_thread_was_telling_at_the_fork() -> None:
    with LOG.lock:  # as that of a thread that is not in the child
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            LOG.emit("test")
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
