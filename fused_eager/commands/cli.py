"""The command line: a table of subcommands, each a module with a `main(argv, prog) -> exit code` of its own.

Only the module of the chosen command is imported, so that `config` does not wait for what `doctor` needs.
Exit codes: 0 success, 1 the command found something wrong, 2 it was called wrongly.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: `module` of `fused_eager` has `main(argv, prog) -> int`, which parses what follows its name."""

    name: str
    module: str
    help: str
    runs: bool = False  # somebody's program: what that raises is its own


COMMANDS: tuple[Command, ...] = (
    Command("run", "commands.launch", "run a Python program or module under fused_eager(), unmodified", True),
    Command("report", "commands.report", "what a run did and what to change, from its event log"),
    Command("diff", "reporting.compare", "what is different between the event logs of two runs"),
    Command("top", "reporting.top", "follow the event log of a running program"),
    Command("explain", "commands.explain", "run a program, say what became of each of its lines", True),
    Command("config", "config", "print every option: value, origin, environment variable, help"),
    Command("cache", "commands.housekeeping", "the compile cache: list, explain, verify, clean, export, warm"),
    Command("warm", "commands.warming", "compile a program's regions for TPUs that are not here, into the cache"),
    Command("forecast", "commands.forecasting", "say what a program's step would take on TPUs that are not here"),
    Command("export", "commands.export", "write a program of torch.export's as one that plain JAX runs"),
    Command("ops", "commands.ops", "say which of torch's ops run through XLA, and why others do not"),
    Command("bug-report", "commands.bug_report", "run a program and put what a report of a bug needs into a zip file"),
    Command("doctor", "commands.doctor", "say what was found: versions, devices, cache, known-bad combinations"),
)


def usage(prog: str) -> str:
    """The help text of the whole command."""
    width = max(len(command.name) for command in COMMANDS)
    rows = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    return "\n".join([f"usage: {prog} COMMAND ...", "", *rows, "", f"{prog} COMMAND --help says more of each."])


def _program() -> str:
    name = os.path.basename(sys.argv[0])
    return "python -m fused_eager" if name == "__main__.py" else name


def _run(command: Command, argv: list[str], prog: str) -> int:
    try:
        code = int(importlib.import_module(f"fused_eager.{command.module}").main(argv, f"{prog} {command.name}"))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if command.runs:
            raise
        # Whoever read this has seen enough (`| head`); at its end the interpreter flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if command.runs:
            raise
        print(f"\n{prog} {command.name}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (`sys.argv[1:]`) names; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    prog = _program()
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(prog), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    for command in COMMANDS:
        if command.name == argv[0]:
            return _run(command, argv[1:], prog)
    near = difflib.get_close_matches(argv[0], [command.name for command in COMMANDS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    print(f"{prog}: there is no command {argv[0]!r}{hint}\n\n{usage(prog)}", file=sys.stderr)
    return 2
