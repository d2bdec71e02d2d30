"""Waiting says what it waits for, but only when it is long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fused_eager import progress


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set once something has been written; the first word comes almost at once here, and the second too."""
    monkeypatch.setattr(progress, "FIRST", 0.01)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    yield threading.Event()


def test_long_waits_are_told_again_and_again(told: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Stderr:
        def write(self, text: str) -> int:
            lines.append(text)
            if len("".join(lines).splitlines()) >= 2:
                told.set()
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(progress.sys, "stderr", Stderr())
    with progress.waiting("compiling the thing"):
        assert told.wait(30)
    first = "".join(lines).splitlines()[0]
    assert first.startswith("fused_eager: compiling the thing, ") and first.endswith(" s so far")


def test_short_waits_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.waiting("nothing"):
        pass
    assert capsys.readouterr() == ("", "")


def test_disabled_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.threading, "Thread", None)
    with progress.waiting("anything", enabled=False):
        pass


def test_the_body_s_exception_ends_the_telling(told: threading.Event) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), progress.waiting("a failure"):
        raise KeyError
    for thread in threading.enumerate():
        if thread.name == "fused-eager progress":
            thread.join(30)
    assert threading.active_count() <= before


def test_what_is_told_may_change_while_it_lasts(told: threading.Event, capsys: pytest.CaptureFixture[str]) -> None:
    words = iter(["looking it up", "waiting for another process"])

    def what() -> str:
        word = next(words, "")
        if not word:
            told.set()
        return word

    with progress.waiting(what):
        assert told.wait(30)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert "looking it up, " in first and "waiting for another process, " in second


def test_the_body_runs_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = []
    with progress.waiting("the end of a process"):
        ran.append(1)
    assert ran


def test_a_wait_without_a_thread_is_told_too(
    told: threading.Event, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.threading, "Thread", None)
    answers = iter([False, False, True])
    progress.until(lambda seconds: next(answers), "the last compilation")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("fused_eager: the last compilation, ") for line in lines)
