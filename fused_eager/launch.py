"""`run`: execute somebody's program under `fused_eager()` as plain Python would have executed it.

What the program can see of its start is plain Python's: `sys.argv`, `sys.path[0]`, `__main__` and its `__file__`,
`__spec__` and `__package__`, the exit code, and a traceback that begins in the program.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from fused_eager.config import OPTIONS, OptionError, parse_assignment, resolve

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WITH_VALUE = ("--mode", "--option")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our part of `argv`, up to and with the program's name, and the program's own arguments.

    argparse cannot make this cut: it would take a `--mode` or a `--` that is meant for the program.
    """
    end = 0
    while end < len(argv) and argv[end].startswith("-") and argv[end] != "-m":
        end += 2 if argv[end] in _WITH_VALUE else 1
    end += 2 if argv[end : end + 1] == ["-m"] else 1
    return list(argv[:end]), list(argv[end:])


def _assignment(text: str) -> tuple[str, object]:
    try:
        return parse_assignment(text, "--option")
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _mode(text: str) -> str:
    try:
        return str(OPTIONS["mode"].parse(text, "--mode"))
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--mode MODE] [--option NAME=VALUE]... [--report] (SCRIPT | -m MODULE) [ARGUMENT...]",
        description="Run a Python program under fused_eager(), unmodified. What follows its name is the program's.",
        allow_abbrev=False,
    )
    parser.add_argument("--mode", type=_mode, help=f"{OPTIONS['mode'].kind.words} (default: the environment's)")
    parser.add_argument(
        "--option",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set an option that the command `config` lists; may be repeated",
    )
    parser.add_argument("--report", action="store_true", help="print the report's summary to stderr at the end")
    program = parser.add_mutually_exclusive_group(required=True)
    program.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    program.add_argument("script", nargs="?", metavar="SCRIPT", help="a file, or a directory or zip with a __main__.py")
    return parser


def _set_first_path(path: str) -> None:
    # With -P, -I or PYTHONSAFEPATH Python put no entry of its own in front, so there is none to replace.
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = path


def _run_script(script: str) -> None:
    # runpy.run_path would take `__main__` away again when the script ends, before its threads and atexit hooks do.
    path = os.path.abspath(script)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main_module = types.ModuleType("__main__")
    vars(main_module).update(__file__=path, __loader__=loader, __builtins__=sys.modules["builtins"], __cached__=None)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))


def _prepare(script: str | None, module: str | None, arguments: list[str]) -> Callable[[], object]:
    """Set `sys.argv` and `sys.path` for the program; returns what runs it. Raises `FileNotFoundError`."""
    if module is not None:
        sys.argv = ["-m", *arguments]
        _set_first_path(os.getcwd())
        return partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
    assert script is not None
    if not os.path.exists(script):
        raise FileNotFoundError(script)
    sys.argv = [script, *arguments]
    if os.path.isdir(script) or not _is_source(script):
        # A directory or zip: run_path puts it on sys.path itself, in front of an entry that plain Python would not have.
        _set_first_path(script)
        return partial(runpy.run_path, script, run_name="__main__")
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    return partial(_run_script, script)


def _is_source(path: str) -> bool:
    with open(path, "rb") as file:
        return b"\0" not in file.read(4096)


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """`traceback` from its first frame outside this package and runpy on; None where there is no such frame."""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not (name.startswith(_HERE) or name in (runpy.__file__, "<frozen runpy>")):
            return traceback
        traceback = traceback.tb_next
    return None


def _hide_our_frames() -> None:
    """Have the uncaught exception that is on its way printed without the frames that lead from here to the program.

    Python itself still prints it and chooses the exit status (a Ctrl-C ends the process by the signal), and a hook
    that the program has set is obeyed.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        part = users_part(traceback)
        # An error in our own code must keep its frames; a program that does not parse has none, and needs none.
        if part is not None or isinstance(error, SyntaxError):
            error, traceback = error.with_traceback(part), part
        hook(kind, error, traceback)

    sys.excepthook = show


def main(argv: list[str], prog: str) -> int:
    """Run the program that `argv` names. Returns 0, 1 for a module or 2 for a file or an option that does not exist;
    `SystemExit` and whatever the program raises pass through."""
    ours, theirs = split(argv)
    arguments = _parser(prog).parse_args(ours)
    options = dict(arguments.option)
    if arguments.mode is not None:
        options["mode"] = arguments.mode
    try:
        resolve(options)
        program = _prepare(arguments.script, arguments.module, theirs)
    except OptionError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError:
        print(f"{prog}: there is no file {arguments.script!r}", file=sys.stderr)
        return 2

    import fused_eager
    from fused_eager.context import fused_eager as context

    try:
        with context(**options):
            program()
    except SystemExit:
        raise
    except BaseException as error:
        if arguments.module is not None and isinstance(error, ImportError) and users_part(error.__traceback__) is None:
            print(f"{prog}: {error}", file=sys.stderr)
            return 1
        _hide_our_frames()
        raise
    finally:
        if arguments.report:
            print(fused_eager.report(), file=sys.stderr)
    return 0
