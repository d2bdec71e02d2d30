"""Whether another process is alive, as far as this host knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import cache_alone
import pytest
from fused_eager.cache import alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
TELLS = "from fused_eager.cache import alive; print(alive.mark(), flush=True); import time; time.sleep(600)"


@pytest.fixture
def other():
    process = subprocess.Popen(cache_alone.command(TELLS), stdout=subprocess.PIPE, text=True)
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def until(mark: str, state: str) -> bool:
    deadline = time.monotonic() + 30
    while alive.state_of(mark) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive.state_of(mark) == state


def test_another_process_lives_stops_goes_on_and_dies(other):
    process, mark = other
    assert alive.state_of(alive.mark()) == alive.state_of(mark) == alive.ALIVE
    process.send_signal(signal.SIGSTOP)
    assert until(mark, alive.STOPPED)
    process.send_signal(signal.SIGCONT)
    assert until(mark, alive.ALIVE)
    process.kill()
    assert until(mark, alive.DEAD)  # nobody has waited for it yet
    process.wait()
    assert alive.state_of(mark) == alive.DEAD


def test_a_number_that_another_process_has_by_now_is_a_dead_one():
    number, start, where = alive.mark().split(".")
    assert alive.state_of(f"{number}.{int(start) - 1}.{where}") == alive.DEAD


def test_of_other_machines_containers_and_users_nothing_is_known(monkeypatch):
    number, start, _ = alive.mark().split(".")
    assert alive.state_of(f"{number}.{int(start) - 1}.{'0' * 16}") == alive.UNKNOWN
    mark = alive.mark()
    monkeypatch.setattr(os, "geteuid", lambda: 12345678)
    assert alive.state_of(mark) == alive.UNKNOWN


@pytest.mark.parametrize("text", ["", "x", "1", "1.2", "1.2.3", "9" * 50 + ".1." + "0" * 16, "../1.1." + "0" * 16])
def test_any_text_is_fine(text):
    assert alive.state_of(text) == alive.UNKNOWN


def test_where_nothing_can_be_known_there_is_no_mark(monkeypatch):
    alive._where.cache_clear()
    monkeypatch.setattr(os, "readlink", lambda path: (_ for _ in ()).throw(PermissionError(path)))
    try:
        assert alive.mark() == ""
    finally:
        alive._where.cache_clear()
