"""A process of XLA's own: it compiles what is compiled here, and whatever becomes of it, the program goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import torch

from fused_eager import fused_eager, report, xla
from fused_eager.compiling import background
from fused_eager.compiling.xla_cpu import finishing, subprocess_compiler
from fused_eager.compiling.xla_cpu.subprocess_compiler import COMPILER, Abandoned, Compiler, Ended, Refused, Unavailable
from fused_eager.executing import load
from fused_eager.log.events import LOG
from tests.streams import events

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there is none on this system: all is compiled here")


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.close()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    load.forget()
    yield
    load.forget()


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, greeting: str = "b'{}'") -> None:
    """Processes that are started from now on answer each program by running some lines instead of XLA."""
    program = f"""
import json, os, signal, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv_bytes()
connection.send_bytes({greeting})
while True:
    connection.recv_bytes(), connection.recv_bytes(), connection.recv_bytes()
    {textwrap.indent(textwrap.dedent(answer), "    ").strip()}
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    monkeypatch.setattr(subprocess_compiler, "_PROGRAM", path)


def program() -> tuple[bytes, bytes]:
    lowered = jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((5,), "float32"))
    return xla.bytecode(lowered), xla.options({})


def process_of(compiler: Compiler) -> subprocess.Popen[bytes]:
    process = compiler._process
    assert process is not None
    return process


def function(x: torch.Tensor, n: int) -> list[float]:
    """Loops, a product, a sort, checks and numbers, in shapes that no other test has."""
    y = (x @ x.t() / 7).softmax(0) * 1.25
    picked = y[torch.tensor([0, 2, 1])].sort(1)[0]
    return [*(picked.tanh() + n).sum(0).tolist(), y.sum().item()]


def test_a_region_computes_the_same_wherever_it_is_compiled(nothing_compiled: None) -> None:
    x = torch.linspace(-1, 1, 37 * 19).reshape(37, 19)
    found = []
    for where in ("process", "thread"):
        load.forget()
        with events("compile") as seen, fused_eager(compile="wait", native="never", cache="off", compiler=where):
            found.append(function(x, 3))
        assert seen and {event.data["in_subprocess"] for event in seen} == {where == "process"}
    assert found[0] == found[1], "bit for bit"


def test_it_holds_neither_torch_nor_jax(compiler: Compiler) -> None:
    assert compiler.compile(*program(), strip=True)
    maps = Path(f"/proc/{process_of(compiler).pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what a process has loaded")
    text = maps.read_text()
    assert "jaxlib" in text and "libtorch" not in text


def test_it_goes_after_the_program_where_nobody_waits_for_it(compiler: Compiler) -> None:
    assert compiler.compile(*program(), strip=False, nice=background.NICE)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process_of(compiler).pid) == mine + background.NICE


def test_what_xla_refuses_is_told_in_its_words_and_the_process_goes_on(compiler: Compiler) -> None:
    good, options = program()
    with pytest.raises(Refused, match=r"(?i)mlir|pars|bytecode"):
        compiler.compile(b"no program", options, strip=False)
    process = process_of(compiler)
    assert compiler.compile(good, options, strip=False) and process_of(compiler) is process


def test_it_ends_when_it_has_nothing_to_do_and_comes_back(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_compiler, "IDLE", 0.05)
    assert compiler.compile(*program(), strip=False)
    first = process_of(compiler)
    assert first.wait(30) == 0
    assert compiler.compile(*program(), strip=False) and process_of(compiler) is not first


def test_a_crash_is_an_error_that_says_so(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(Ended, match=r"ended by signal 11 \(SIGSEGV\)"):
        compiler.compile(b"", b"", strip=False)
    monkeypatch.undo()
    assert compiler.compile(*program(), strip=False), "the next one finds another process"


def test_its_end_is_noticed_whoever_holds_its_connection(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a forked child may."""
    monkeypatch.setattr(subprocess_compiler, "GLANCE", 0.05)
    stand_in(tmp_path, monkeypatch, "os.fork() or time.sleep(600); os.kill(os.getpid(), signal.SIGKILL)")
    compiler.start()
    group = process_of(compiler).pid
    try:
        with pytest.raises(Ended, match="SIGKILL"):
            compiler.compile(b"", b"", strip=False)
    finally:
        os.killpg(group, signal.SIGKILL)


def test_nobody_forks_while_it_is_being_started(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, inside, go_on = compiler._begin, threading.Event(), threading.Event()

    def slowly() -> subprocess_compiler.Connection:
        inside.set()
        assert go_on.wait(60)
        return begin()

    monkeypatch.setattr(compiler, "_begin", slowly)
    starter = threading.Thread(target=compiler.start)
    starter.start()
    assert inside.wait(60)
    forks = threading.Thread(target=lambda: (compiler.before_fork(), compiler.after_fork()))
    forks.start()
    forks.join(0.1)
    assert forks.is_alive()
    go_on.set()
    forks.join(60)
    starter.join(60)
    assert compiler._process is not None and not forks.is_alive()


def test_it_imports_nothing_of_the_programs(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies first on its path, and is called like something of Python's or jaxlib's."""
    for name in ("platform", "queue", "numpy", "jaxlib", "ml_dtypes", "strip", "google"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "google"]:
        monkeypatch.delitem(sys.modules, name)  # as where nothing has imported it, and so that none of these stays
    assert compiler.compile(*program(), strip=True)
    assert not (tmp_path / "imported").exists()


def test_a_want_of_file_descriptors_passes(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess_compiler, "Pipe", none_left)
        with pytest.raises(Unavailable, match="Too many open files"):
            compiler.start()
    assert compiler.compile(*program(), strip=False)


def test_a_region_that_xla_crashes_over_runs_natively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_compiled: None
) -> None:
    x = torch.linspace(-1, 1, 41 * 3).reshape(41, 3)
    plain = function(x, 4)
    COMPILER.forget()
    stand_in(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGABRT)")
    with events("compile", "compile-failed") as seen, fused_eager(compile="wait", native="never", cache="off"):
        assert function(x, 4) == pytest.approx(plain)
    assert seen and {event.kind for event in seen} == {"compile-failed"}
    assert "SIGABRT" in seen[0].data["error"]
    assert any("SIGABRT" in failure["error"] for failure in report().facts.failures)
    COMPILER.forget()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("greeting", "jaxlib is another one"),
        ("start", "cannot be started: .*no more processes"),
        ("frozen", "no Python that could be started again"),
        ("end", "did not start: ended with exit code 3"),
    ],
)
def test_where_there_can_be_none_all_is_compiled_here(
    what: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_compiled: None
) -> None:
    """Tried once: the same reason is given from then on, without another try."""
    compiler = Compiler()
    monkeypatch.setattr(finishing, "COMPILER", compiler)
    if what == "greeting":
        stand_in(tmp_path, monkeypatch, "pass", """b'{"error": "jaxlib is another one"}'""")
    elif what == "end":
        stand_in(tmp_path, monkeypatch, "pass", "b'' if sys.exit(3) else b''")
    elif what == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:

        def refused(*args: object, **kwargs: object) -> None:
            raise BlockingIOError("no more processes")

        monkeypatch.setattr(subprocess, "Popen", refused)
    x = torch.linspace(-1, 1, 43 * 5).reshape(43, 5)
    with events("compile") as seen, fused_eager(compile="wait", native="never", cache="off"):
        function(x, 5)
    assert seen and not any(event.data["in_subprocess"] for event in seen)
    for _ in range(2):
        with pytest.raises(Unavailable, match=reason):
            compiler.compile(b"", b"", strip=False)
    assert any(name.startswith("regions compiled in this process: ") for name in LOG.counts)
    compiler.close()


def test_what_needs_functions_of_this_process_is_compiled_here(nothing_compiled: None) -> None:
    x = torch.eye(7) * 3 + 0.125
    with events("compile") as seen, fused_eager(compile="wait", native="never", cache="off"):
        (torch.linalg.cholesky(x) * 2).sum().item()
    assert False in {event.data["in_subprocess"] for event in seen}


def test_an_answer_that_nobody_took_is_not_the_next_ones(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while the process compiles ends it."""
    assert compiler.compile(*program(), strip=False)
    process, interrupted = process_of(compiler), iter([True])
    receive = subprocess_compiler.Connection.recv_bytes

    def interrupt(connection: subprocess_compiler.Connection) -> bytes:
        if next(interrupted, False):
            raise KeyboardInterrupt
        return receive(connection)

    monkeypatch.setattr(subprocess_compiler.Connection, "recv_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile(b"no program", b"", strip=False)
    assert process.wait(30) is not None
    assert compiler.compile(*program(), strip=False)


def test_who_waits_when_it_is_closed_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, told = Compiler(), threading.Event()
    stand_in(tmp_path, monkeypatch, "time.sleep(600)")

    def ask() -> None:
        try:
            compiler.compile(b"", b"", strip=False)
        except Abandoned:
            told.set()

    thread = threading.Thread(target=ask)
    thread.start()
    while not compiler._greeted:
        time.sleep(0.01)
    compiler.close()
    assert told.wait(30)
    with pytest.raises(Abandoned):
        compiler.compile(b"", b"", strip=False)
    thread.join()


# ---- whole programs --------------------------------------------------------------------------------------------------

SLEEPY = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from fused_eager import fused_eager
from fused_eager.compiling.xla_cpu import finishing, subprocess_compiler
subprocess_compiler._PROGRAM = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background has it ignored
def rounds(n):
    until = time.monotonic() + 60
    x = torch.linspace(-1, 1, 64)
    for _ in range(n):
        y = ((x * 2).tan() + 3).sum()
        if y.item() != y.item() or time.monotonic() > until:
            raise SystemExit("too long")
"""


def run(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    """A program whose compiler takes ten minutes for everything."""
    stand_in(tmp_path, monkeypatch, "time.sleep(600)")
    command = [sys.executable, "-c", SLEEPY + textwrap.dedent(body), str(tmp_path / "program.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_ctrl_c_ends_the_wait_for_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the program waits, and leaving the context begins no other compilation."""
    done = run(
        """
        def interrupt():
            while not subprocess_compiler.COMPILER._greeted:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
        x = torch.ones(3)
        try:
            with fused_eager(compile="wait", native="never"):
                y = x * 2 + 1
                print(y.tolist())
        except KeyboardInterrupt:
            print("interrupted", y.tolist())
        """,
        tmp_path,
        monkeypatch,
    )
    assert (done.returncode, done.stdout) == (0, "interrupted [3.0, 3.0, 3.0]\n"), done.stderr


@pytest.mark.parametrize("ending", ["kept nowhere", pytest.param("error", marks=pytest.mark.slow)])
def test_the_end_of_a_program_does_not_wait_for_what_nobody_will_use(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for what a program that has failed would have kept; the test's own limit is what it must not reach."""
    done = run(
        f"""
        with fused_eager(compile="auto", native="never", cache={"off" if ending == "kept nowhere" else ""!r}):
            while not subprocess_compiler.COMPILER._greeted:
                rounds(2)
        print("done", flush=True)
        if {ending == "error"}:
            raise ValueError("its own")
        """,
        tmp_path,
        monkeypatch,
    )
    assert done.stdout == "done\n" and done.returncode == (ending == "error"), done.stderr
    assert ("its own" in done.stderr) == (ending == "error")


def test_standard_streams_may_be_closed(tmp_path: Path) -> None:
    """The connection must not lie where the process will have its own."""
    program = f"""
import jax, torch
from fused_eager import xla
from fused_eager.compiling.xla_cpu.subprocess_compiler import COMPILER
lowered = jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((3,), "float32"))
open({str(tmp_path / "done")!r}, "w").write(str(len(COMPILER.compile(xla.bytecode(lowered), xla.options({{}}), True))))
"""
    command = f'exec "{sys.executable}" -c "$0" <&- >&-'
    done = subprocess.run(["sh", "-c", command, program], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert int((tmp_path / "done").read_text()) > 0


def test_it_ends_with_a_program_that_is_killed(tmp_path: Path) -> None:
    program = """
        import os, signal
        from fused_eager.compiling.xla_cpu.subprocess_compiler import COMPILER
        COMPILER.start()
        print(COMPILER._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    limit = time.monotonic() + 30
    while Path(f"/proc/{done.stdout.strip()}/cmdline").exists() and time.monotonic() < limit:
        if not Path(f"/proc/{done.stdout.strip()}/cmdline").read_bytes():
            break  # it has ended, and nobody has asked how
        time.sleep(0.05)
    assert time.monotonic() < limit
