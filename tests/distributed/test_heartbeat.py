"""Who is silent: a process that has stopped is, and one that has no chance to speak is not."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fused_eager import progress
from fused_eager.ranks import heartbeat
from fused_eager.ranks.faults import Fault
from fused_eager.ranks.heartbeat import EXIT_CODE, Heartbeat, Seen
from fused_eager.ranks.status import Place, Status, this_host

SPINS = "print('ready', flush=True)\nwhile True: pass"
SLEEPS = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
STARVED = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n" + SPINS


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def started(processes: list[subprocess.Popen[str]], code: str) -> Seen:
    """A rank that has beaten once, and since then runs `code`."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    processes.append(process)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    seen = Seen()
    seen.take(Status(1, beat=1, host=this_host(), pid=process.pid))
    return seen


def look(seen: Seen, times: int = 3) -> Seen:
    """Look at it again and again, and find nothing new."""
    for _ in range(times):
        assert seen.status is not None
        seen.take(dataclasses.replace(seen.status))
        time.sleep(0.4)
    return seen


def test_who_computes_is_not_silent(processes: list[subprocess.Popen[str]]) -> None:
    assert look(started(processes, SPINS)).works()


def test_who_sleeps_or_is_stopped_is(processes: list[subprocess.Popen[str]]) -> None:
    assert not look(started(processes, SLEEPS)).works()
    stopped = started(processes, SPINS)
    os.kill(processes[-1].pid, signal.SIGSTOP)
    assert not look(stopped).works()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system does not say who queues")
def test_who_waits_for_a_processor_is_not(processes: list[subprocess.Popen[str]]) -> None:
    before, one = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {one})  # of what is started from here, too
    try:
        seen = started(processes, STARVED)
        started(processes, SPINS)
        assert look(seen, 5).works()
        with open(f"/proc/{processes[0].pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        assert (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") < 0.5, "it was not starved"
    finally:
        os.sched_setaffinity(0, before)


def test_what_is_found_anew_begins_again(processes: list[subprocess.Popen[str]]) -> None:
    seen = look(started(processes, SPINS))
    assert seen.status is not None and seen.looks == 3
    seen.take(dataclasses.replace(seen.status, beat=2))
    assert seen.looks == 0 and not seen.works()


def test_nothing_is_known_of_a_process_elsewhere() -> None:
    seen = Seen()
    seen.take(Status(1, beat=1, host="elsewhere", pid=os.getpid()))
    assert not look(seen, 2).works()


def test_a_compilation_in_a_collective_is_no_wait_that_nothing_can_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    beat: Heartbeat = object.__new__(Heartbeat)
    beat.rank, beat.fault, beat._stopped = 0, Fault("gone", 1, "is lost"), threading.Event()
    beat.channel = SimpleNamespace(port=0)  # type: ignore[assignment]

    def ended(code: int) -> None:
        codes.append(code)
        beat._stopped.set()

    monkeypatch.setattr(heartbeat, "os", SimpleNamespace(_exit=ended))
    monkeypatch.setattr(heartbeat, "place", lambda: Place("train.py:1", "all_reduce", is_sure=True))
    monkeypatch.setattr(heartbeat, "IDLE", 1e9)  # whatever this process is at besides
    monkeypatch.setattr(heartbeat, "STUCK", 0.5)
    watcher = threading.Thread(target=beat._end_if_stuck, daemon=True)
    with progress.waiting("compiling 3 ops", False):
        watcher.start()
        watcher.join(2.0)
        assert not codes and watcher.is_alive()
    watcher.join(30)
    assert codes == [EXIT_CODE]
