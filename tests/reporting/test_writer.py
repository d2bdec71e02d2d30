"""The event log in files: written as it goes, one per process, readable whatever happens."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fused_eager import OptionError, fused_eager
from fused_eager.executing import load
from fused_eager.log import site
from fused_eager.log.events import LOG
from fused_eager.reporting import reading, writer
from fused_eager.reporting.reading import LogError
from fused_eager.reporting.schema import COMMON, KINDS, VERSION


def program(x: torch.Tensor) -> float:
    return float((x * 2.0 + 1.0).sum())


def run(path: Path, times: int = 2) -> None:
    with fused_eager(report=str(path)):
        for _ in range(times):
            program(torch.ones(3, 5))


def test_a_run_leaves_a_log_that_keeps_to_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    load.forget()  # a plan is told when it is made
    run(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["kind"] == "start" and lines[0]["v"] == VERSION and lines[0]["pid"] == os.getpid()
    kinds = {line["kind"] for line in lines}
    assert {"open", "plan", "flush", "sync", "close"} <= kinds
    for line in lines:
        kind = line.pop("kind")
        if kind.startswith("cache-") and kind not in KINDS:
            continue
        known = {f.name for f in (*COMMON, *KINDS[kind].fields)} - {"kind"}
        assert set(line) == known, kind


def test_the_option_costs_nothing_when_it_is_off(tmp_path: Path) -> None:
    with fused_eager():
        assert not LOG.detailed and not site._details
    run(tmp_path / "log")
    assert not LOG.detailed and not site._details and not any(isinstance(s, writer.Writer) for s in LOG.sinks)


def test_contexts_share_a_file_and_a_second_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with fused_eager(report=str(path)), fused_eager(report=str(path), mode="strict"):
        program(torch.ones(2))
    run(path)
    process = reading.read_one(str(path))
    assert [e.kind for e in process.events].count("open") == 2
    assert not process.broken


def test_mode_off_writes_nothing(tmp_path: Path) -> None:
    with fused_eager(mode="off", report=str(tmp_path / "log")):
        program(torch.ones(2))
    assert not (tmp_path / "log").exists()


def test_a_path_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "no_such_folder" / "x")
    with pytest.raises(OptionError, match=r"report.*an argument.*no_such_folder.*allowed"), fused_eager(report=path):
        raise AssertionError("not reached")
    with fused_eager():  # and nothing is left behind
        assert program(torch.ones(2)) == 6.0


@pytest.mark.parametrize(
    "text",
    [
        "import os\n",
        "no line end",
        '{"kind": "start", "service": "of somebody else"}\n',
        '{"t": 0.0, "kind": "flush"}\n{"kind": "start", "t": 0.0, "v": 1}\n',
        "[" * 100_000,
        "\n",
    ],
)
def test_a_file_that_is_no_log_is_refused_and_left_as_it_is(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "precious.py"
    path.write_text(text)
    monkeypatch.setenv("FUSED_EAGER_REPORT", str(path))
    with pytest.raises(OptionError, match=r"FUSED_EAGER_REPORT.*is no event log.*allowed"), fused_eager():
        raise AssertionError("not reached")
    assert path.read_text() == text


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)
    os.write(end, b"a line\n")  # who reads it does not wait, and fails this test
    try:
        for path in (pipe, tmp_path, os.devnull):
            with pytest.raises(OptionError, match="a folder, a pipe or a device"), fused_eager(report=path):
                raise AssertionError("not reached")
        assert os.read(end, 100) == b"a line\n"
    finally:
        os.close(end)


def test_where_the_program_prints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    with path.open("w") as file:
        stat = os.fstat
        monkeypatch.setattr(os, "fstat", lambda fd: stat(file.fileno() if fd == 1 else fd))
        assert "prints" in writer._objection(str(path))


def test_what_an_earlier_run_left_is_replaced_and_an_empty_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    run(path)
    first = path.read_text().splitlines()[0]
    for text in (first + "\n", first, first[:60], json.dumps(json.loads(first), separators=(",", ":")) + "\nmore\n"):
        path.write_text(text)
        assert not writer._objection(str(path))
    del writer._writers[str(path)]  # another process finds it
    run(path)
    assert reading.read_one(str(path)).broken == 0


def fill(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A disk that has room for so many bytes of `path` from the call of what is returned on."""
    room: list[int] = []
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if not room or not path.exists() or not os.path.samestat(os.fstat(fd), path.stat()):
            return real(fd, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    return room.append


@pytest.mark.parametrize("when", ["first line", "in the body", "at the end", "at exit"])
def test_a_full_disk_costs_the_report_and_not_the_program(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    full = fill(path, monkeypatch)
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    with pytest.warns(UserWarning, match=f"cannot write the report {path}: No space left") as told:
        if when == "first line":
            full(0)
        with fused_eager(report=str(path)):
            mine = writer._writers[str(path)]
            mine.drain()
            if when == "in the body":
                full(1)  # a line's first byte
            assert program(torch.ones(2)) == 6.0
            if when in ("first line", "in the body"):
                mine.thread.join(10.0)  # it is the one that finds out
                assert not mine.thread.is_alive() and mine not in LOG.sinks and not LOG.detailed
                assert program(torch.ones(2)) == 6.0
                mine(LOG.events[-1])  # who was about to tell it
                assert not mine.queue
            if when == "at the end":
                full(0)
        if when == "at exit":
            full(0)
        mine.close()
        mine.thread.join(10.0)  # it may be the one that says it
        run(path)  # the next context does not say it again, and leaves what was written
    assert len(told) == 1 and not died and mine not in LOG.sinks and not LOG.detailed and not site._details
    if when == "first line":
        assert not path.read_bytes()
    else:
        process = reading.read_one(str(path))
        assert not process.ended and process.events and process.broken == (when == "in the body")


def test_a_full_disk_raises_nothing_where_warnings_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = fill(tmp_path / "log", monkeypatch)
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("error", "cannot write the report")
        with fused_eager(report=str(tmp_path / "log")):
            full(0)
        writer._writers[str(tmp_path / "log")].thread.join(10.0)  # it may be the one that says it
    assert ["cannot write the report" in str(one.message) for one in told] == [True]


SCRIPT = """
import os, sys, time, torch
from fused_eager import fused_eager
with fused_eager():
    for _ in range(3):
        (torch.ones(4) * 2).sum().item()
    if sys.argv[1] == "hang":
        print("ready", flush=True)
        time.sleep(60)
"""


def environment(path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "FUSED_EAGER_REPORT": str(path), "FUSED_EAGER_CACHE": "off", **more}


def test_a_killed_process_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    command = [sys.executable, "-c", SCRIPT, "hang"]
    with subprocess.Popen(command, env=environment(path), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(2 * writer.EVERY)
        child.send_signal(signal.SIGKILL)
    process = reading.read_one(str(path))
    assert not process.ended and not process.broken
    assert [e.kind for e in process.events].count("flush") == 3


def test_ranks_write_files_of_their_own_and_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234", "WORLD_SIZE": "2"}
    (tmp_path / "log.rank7").write_text('{"kind": "start", "t": 0, "v": 1, "job": "an older one", "rank": 7}\n')
    for rank in (1, 0):
        command = [sys.executable, "-c", SCRIPT, "end"]
        subprocess.run(command, env=environment(path, RANK=str(rank), **job), check=True, timeout=120)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.rank1", "log.rank7"]
    found = reading.read(path)
    assert [p.name for p in found] == ["rank 0", "rank 1"] and all(p.ended for p in found)


def test_a_second_process_leaves_the_file_of_one_that_lives_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert writer.claim(str(path))[0] == str(path)
    path.write_text(json.dumps({"kind": "start", "pid": os.getppid(), "host": os.uname().nodename, "job": "j"}) + "\n")
    assert writer.claim(str(path)) == (f"{path}.pid{os.getpid()}", "j")
    path.write_text(json.dumps({"kind": "start", "pid": 2**22 + 1, "host": os.uname().nodename, "job": "j"}) + "\n")
    assert writer.claim(str(path))[0] == str(path), "the one who wrote it is gone"


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with fused_eager(report=str(path)):
        program(torch.ones(2))
        pid = os.fork()
        if pid == 0:
            program(torch.ones(2))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        program(torch.ones(2))
    process = reading.read_one(str(path))
    assert not process.broken and {e.kind for e in process.events} >= {"open", "close"}
    reasons = [e.data["reason"] for e in process.events if e.kind == "sync"]
    assert reasons.count("sync.value") == 2, "the parent's two, not the child's"


def test_a_context_that_is_not_entered_leaves_the_log(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cache"), fused_eager(report=str(tmp_path / "log"), cache="bad://x"):
        pass
    assert not any(isinstance(sink, writer.Writer) for sink in LOG.sinks)


def test_a_torn_last_line_costs_that_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run(path)
    whole = reading.read_one(str(path))
    path.write_text(path.read_text()[:-20])
    torn = reading.read_one(str(path))
    assert torn.broken == 1 and len(torn.events) == len(whole.events) - 1


@pytest.mark.parametrize("text", ["hello\n", "", "[1]\n", '{"kind": "flush", "t": 1}\n'])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(LogError, match="no event log"):
        reading.read(path)


def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"kind": "start", "t": 0, "v": 99}\n')
    with pytest.raises(LogError, match="version 99"):
        reading.read(path)


def test_a_log_of_version_1_is_read_by_its_own_names(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        '{"kind": "start", "t": 0, "v": 1}\n'
        '{"kind": "pace", "t": 1, "site": "a.py:7", "native": true, "fused_s": 0.3, "native_s": 0.1}\n'
        '{"kind": "aside", "t": 9, "turn": "step", "turns": 3, "seconds": 7.0, "reason": "region.native"}\n'
    )
    (process,) = reading.read(path)
    assert [e.kind for e in process.events] == ["choice", "bypass"]
