"""Many regions compiled at once: a compiler that ends its process takes no other region with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fused_eager.cache import Key

from fused_eager.compiling import crossing
from fused_eager.compiling.cross import Refusal
from fused_eager.targets.target import Target

V5E = Target.parse("v5e:1")


def made(key: Key, target: Target) -> Refusal:
    """In the place of the compiler: it ends the process for odd numbers."""
    if key.parts["number"] % 2:
        print("noise\nF1128 11:22:01.2 7 shape.h:843] Check failed: buffer\nmore", file=sys.stderr, flush=True)
        os._exit(3)
    return Refusal(f"made {key.parts['number']} for {target}")


@pytest.mark.slow
def test_what_ends_the_process_is_refused_with_its_last_words_and_the_others_are_made(
    capfd: pytest.CaptureFixture[str],
) -> None:
    keys = [Key({"number": number}) for number in range(5)]
    found = dict(crossing.crossed(keys, V5E, 2, made))
    assert {key.parts["number"] for key in found} == set(range(5))
    for key, outcome in found.items():
        number = key.parts["number"]
        if number % 2:
            assert outcome.reason == (
                "XLA's compiler ended its process: F1128 11:22:01.2 7 shape.h:843] Check failed: buffer"
            )
        else:
            assert outcome.reason == f"made {number} for v5e:1x1"
    assert capfd.readouterr().err == ""


def waits(key: Key, target: Target) -> Refusal:
    """In the place of the compiler: it takes minutes, and heeds no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(key.parts["file"], "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(300)
    return Refusal("")


def _compiles(file: str) -> None:
    list(crossing.crossed([Key({"file": file})], V5E, 1, waits))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_what_is_stopped_leaves_no_process_behind(end: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "worker"
    # What is started in the background, as these tests may be, ignores SIGINT.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    do = f"if __name__ == '__main__':\n    {heeds}\n    _compiles({str(file)!r})"
    (tmp_path / "program.py").write_text(f"from tests.compiling.test_crossing import _compiles\n{do}")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], env=environ, stderr=subprocess.PIPE)
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    worker = int(file.read_text())
    parent.send_signal(end)
    said = parent.communicate(timeout=60)[1].decode()
    assert parent.returncode == -end and ("KeyboardInterrupt" in said or end == signal.SIGKILL)
    until(lambda: not Path(f"/proc/{worker}").exists() or Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z")


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_nothing_starts_nothing() -> None:
    assert list(crossing.crossed([], V5E, 2, made)) == []


def test_a_bar_is_drawn_in_a_terminal_and_told_now_and_then_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    bar = crossing.Bar(3, "compiling", lambda: now[0])
    bar.step()
    assert capsys.readouterr().err == ""
    now[0] = 12.0
    bar.step(failed=True)
    assert capsys.readouterr().err == f"compiling [{'#' * 20}{'.' * 10}] 2/3, 1 failed, 12 s, 6 s to go\n"
    bar.step()
    assert "3/3" in capsys.readouterr().err
