"""The command line, and that `run` starts a program exactly as plain Python does."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fused_eager as package
from fused_eager.commands import cli, launch
from fused_eager.frontends.context import context

# What a program can see of how it was started.
PROBE = """
import sys, json
def annotated(x: int) -> None: ...
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "path": sys.path[0], "doc": __doc__, "cached": globals().get("__cached__"),
    "main": sys.modules["__main__"].__dict__ is globals(), "annotation": str(annotated.__annotations__["x"]),
    "loader": type(__loader__).__name__, "builtins": __builtins__ is sys.modules["builtins"],
}))
"""


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A stand-in for the context, which records its options; and this process as it was, afterwards."""
    seen: list[dict[str, Any]] = []

    @contextmanager
    def fused_eager(**options: Any) -> Iterator[None]:
        seen.append(options)
        yield

    monkeypatch.setattr(package, "fused_eager", fused_eager)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    modules = set(sys.modules)
    yield seen
    for name in set(sys.modules) - modules:  # two tests may each have a module of that name
        del sys.modules[name]


def programs(folder: Path) -> None:
    """The probe as a script, a module, a package, a directory and a zip."""
    for name in ("script.py", "noext", "sub/mod.py", "pack/__main__.py", "pack/inner.py", "plain/__main__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(PROBE)
    (folder / "pack" / "__init__.py").touch()
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)


@pytest.mark.parametrize(
    "program",
    [
        ["script.py", "a", "--mode", "x", "--", "-m", "b"],
        ["./script.py"],
        ["sub/mod.py"],
        ["noext", "-"],
        ["-m", "script", "--report", "c"],
        ["-m", "sub.mod"],
        ["-m", "pack", "d"],
        ["-m", "pack.inner"],
        ["plain", "e"],
        ["app.zip", "f"],
    ],
    ids=" ".join,
)
def test_a_program_sees_the_start_that_plain_python_gives(
    program: list[str],
    contexts: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    programs(tmp_path)
    monkeypatch.chdir(tmp_path)
    plain = subprocess.run([sys.executable, *program], capture_output=True, text=True, check=True)
    assert launch.main(program, "run") == 0
    assert json.loads(capfd.readouterr().out) == json.loads(plain.stdout)
    assert contexts == [{}]


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        (["s.py"], 1),
        (["s.py", "--mode", "x"], 1),
        (["--mode", "strict", "s.py", "-m", "x"], 3),
        (["--mode=strict", "s.py", "--", "y"], 2),
        (["--option", "log=ops", "--report", "-m", "mod", "--option", "z"], 5),
        (["--bad", "s.py"], 2),
        (["--mode"], 2),
        (["-m"], 2),
        ([], 1),
    ],
)
def test_the_cut_between_our_arguments_and_the_programs(argv: list[str], ours: int) -> None:
    assert launch.split(argv) == (argv[:ours], argv[ours:])


def test_options_reach_the_context_with_their_types(contexts: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("")
    argv = ["--mode", "strict", "--option", "max_region=9", "--option=check-nan=on", str(tmp_path / "s.py")]
    assert launch.main(argv, "run") == 0
    assert contexts == [{"mode": "strict", "max_region": 9, "check_nan": True}]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mode", "fast", "s.py"], ["'fast'", "--mode", "debug, strict, fused, off"]),
        (["--option", "max_regoin=3", "s.py"], ["'max_regoin'", "--option", "did you mean 'max_region'"]),
        (["--option", "max_region", "s.py"], ["names no value"]),
        (["--option", "max_region=x", "s.py"], ["a whole number at least 1"]),
        (["--moed", "strict", "s.py"], ["--moed"]),
        (["--mode", "strict"], ["SCRIPT"]),
        (["-m"], ["-m"]),
        (["nowhere.py"], ["'nowhere.py'"]),
        (["."], ["__main__.py"]),
        ([], ["SCRIPT"]),
    ],
)
def test_a_wrong_call_says_why_and_exits_with_2(
    argv: list[str], words: list[str], contexts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = launch.main(argv, "run")
    except SystemExit as error:
        code = error.code
    assert code == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text
    assert not contexts


def test_a_wrong_environment_is_refused_before_the_program_starts(
    contexts: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.py").write_text("print('started')")
    monkeypatch.setenv("FUSED_EAGER_MODE", "fast")
    assert launch.main([str(tmp_path / "s.py")], "run") == 2
    captured = capsys.readouterr()
    assert "FUSED_EAGER_MODE" in captured.err and not captured.out


@pytest.mark.parametrize("option", ["report=no_such_folder/x", "cache=no_such_scheme://x"])
def test_an_option_that_the_context_refuses_is_told_in_one_line(
    option: str,
    contexts: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(package, "fused_eager", context.fused_eager)  # the real one
    (tmp_path / "s.py").write_text("print('started')")
    assert launch.main(["--report", "--option", option, str(tmp_path / "s.py")], "run") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"run: option '{option.split('=')[0]}' ") and captured.err.count("\n") == 1
    assert not captured.out


def test_an_option_error_of_the_program_is_its_own(contexts: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import fused_eager\nraise fused_eager.OptionError('mine')")
    with pytest.raises(package.OptionError, match="mine"):
        launch.main([str(tmp_path / "s.py")], "run")


@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", "json"])
def test_a_module_that_cannot_be_run_is_named(
    module: str, contexts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["-m", module], "run") == 1
    assert f"No module named {module.split('.')[0]}" in capsys.readouterr().err.replace("'", "")


def test_the_programs_own_import_error_is_raised(contexts: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        launch.main([str(tmp_path / "broken.py")], "run")


@pytest.mark.parametrize("code", [0, 3, "bye", None])
def test_sys_exit_passes_through(code: Any, contexts: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(f"import sys; sys.exit({code!r})")
    with pytest.raises(SystemExit) as caught:
        launch.main([str(tmp_path / "s.py")], "run")
    assert caught.value.code == code


def test_frames_of_the_program_are_kept_and_ours_are_not() -> None:
    with pytest.raises(ImportError) as caught:
        launch._run_module("no_such_module")
    traceback = caught.value.__traceback__
    assert traceback is not None
    assert launch.users_part(traceback) is traceback  # it starts in this file
    assert launch.users_part(traceback.tb_next) is None  # and goes on in our package alone
    assert launch.users_part(None) is None


def test_an_error_in_our_own_code_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: shown.append(what))
    launch.hide_our_frames()
    try:
        launch.prepare("no_such_file", None, [])
    except FileNotFoundError as error:
        ours = error.__traceback__.tb_next  # type: ignore[union-attr]
        sys.excepthook(type(error), error, ours)
    assert shown[0][2] is ours


def test_every_command_is_a_row_with_a_main() -> None:
    assert len({command.name for command in cli.COMMANDS}) == len(cli.COMMANDS)
    for command in cli.COMMANDS:
        assert callable(importlib.import_module(f"fused_eager.{command.module}").main)
        assert f"  {command.name} " in cli.usage("x") and command.help in cli.usage("x")


def test_help_wrong_commands_and_dispatch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["--help"]) == 0
    assert "config" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert "usage:" in capsys.readouterr().err
    assert cli.main(["docter"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err
    module = types.ModuleType("fused_eager.later")
    module.main = lambda argv, prog: len(argv) if prog.endswith(" later") else -1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fused_eager.later", module)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, cli.Command("later", "later", "a later one")))
    assert cli.main(["later", "--help", "x"]) == 2


def python(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


@pytest.mark.parametrize("mode", [pytest.param("strict", marks=pytest.mark.slow), "fused"])
def test_an_unmodified_program_runs_fused(mode: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import sys, torch\n"
        "torch.manual_seed(0)\n"
        "w = torch.randn(4, 4, requires_grad=True)\n"
        "for _ in range(3):\n"
        "    loss = (torch.randn(2, 4) @ w).tanh().square().mean()\n"
        "    loss.backward()\n"
        "print(f'{loss.item():.6f} {w.grad.sum().item():.6f}')\n"
        "print(sys.modules['fused_eager'].current_mode() if 'fused_eager' in sys.modules else None)\n"
    )
    plain = python("s.py", cwd=tmp_path).stdout.split()
    done = python("-m", "fused_eager", "run", "--mode", mode, "s.py", cwd=tmp_path)
    assert done.stdout.split() == [*plain[:2], mode], done.stderr
    assert done.returncode == 0


def test_a_traceback_begins_in_the_program(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("def f():\n    raise KeyError('mine')\n\nf()\n")
    plain = python("s.py", cwd=tmp_path)
    done = python("-m", "fused_eager", "run", "s.py", cwd=tmp_path)
    assert done.stderr == plain.stderr
    assert done.returncode == plain.returncode == 1


def test_a_program_that_does_not_parse_is_told_so_as_by_python(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("x = = 1\n")
    plain = python("s.py", cwd=tmp_path)
    done = python("-m", "fused_eager", "run", "s.py", cwd=tmp_path)
    assert (done.stderr, done.returncode) == (plain.stderr, plain.returncode)


def test_ctrl_c_ends_the_process_by_the_signal(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in a shell's background ignores it
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(9)\n"
    )
    done = python("-m", "fused_eager", "run", "--report", "s.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr and "launch.py" not in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "fused_eager", "config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_command_that_is_stopped_says_so_and_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(argv: list[str], prog: str) -> int:
        raise KeyboardInterrupt

    for name in ("warm", "forecast"):
        command = next(command for command in cli.COMMANDS if command.name == name)
        monkeypatch.setattr(importlib.import_module(f"fused_eager.{command.module}"), "main", stopped)
        assert cli.main([name]) == 128 + signal.SIGINT
        said = capsys.readouterr().err
        assert said.endswith(f"{name}: stopped\n") and "Traceback" not in said
