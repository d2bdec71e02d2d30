"""`run`: execute somebody's program under `fused_eager()` as plain Python would have executed it.

What the program can see of its start is plain Python's: `sys.argv`, `sys.path[0]`, `__main__` and its `__file__`,
`__spec__` and `__package__`, the exit code, and a traceback that begins in the program.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from ..config import OPTIONS, OptionError, parse_assignment, resolve
from ..folder import FOLDER

# Frames that lead to a program: ours, and Python's own way of starting and finding modules (not frozen before 3.11).
_OURS = (FOLDER, "<frozen ", runpy.__file__, importlib.util.__file__)
_WITH_VALUE = ("--device", "--mode", "--option", "--ranks-in-process")


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
        usage=f"{prog} [--device NAME] [--cuda-is-tpu] [--ranks-in-process N] [--mode MODE] [--option NAME=VALUE]... "
        "[--report] (SCRIPT | -m MODULE) [ARG...]",
        description="Run a Python program under fused_eager(), unmodified. What follows its name is the program's.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="give the program a device of this name (tpu), whose ops are fused, in place of those on CPU tensors",
    )
    parser.add_argument(
        "--cuda-is-tpu",
        action="store_true",
        help="where the program says cuda, it gets that device (for programs in which the name is written down)",
    )
    parser.add_argument(
        "--ranks-in-process",
        type=int,
        default=0,
        metavar="N",
        help="run the program once for each of N ranks, as torchrun --nproc-per-node N does, but as threads of this "
        "process that take turns, each with a device of its own",
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


def _execute(code: types.CodeType, **attributes: object) -> None:
    """Run `code` as `__main__`, which it stays: threads and atexit hooks of the program outlive its last line.

    (runpy would take `__main__` away when the program ends, and pickling in such a hook would fail.)
    """
    module = types.ModuleType("__main__")
    vars(module).update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _execute_spec(spec: importlib.machinery.ModuleSpec) -> None:
    get_code = getattr(spec.loader, "get_code", None)  # a zip's loader has it, without being an InspectLoader
    code = get_code(spec.name) if get_code else None
    if code is None:
        raise ImportError(f"No code object available for {spec.name}")
    attributes = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader}
    _execute(code, __spec__=spec, __package__=spec.parent, **attributes)


def _run_module(name: str) -> None:
    spec = importlib.util.find_spec(name)  # imports the packages that the module is in
    if spec is not None and spec.submodule_search_locations is not None:
        package, spec = name, importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            raise ImportError(f"No module named {package}.__main__; {package!r} is a package and cannot be executed")
    if spec is None:
        raise ImportError(f"No module named {name}")
    sys.argv[0] = spec.origin or name
    _execute_spec(spec)


def _run_script(path: str) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    _execute(code, __file__=path, __cached__=None, __loader__=loader)


def prepare(script: str | None, module: str | None, arguments: list[str]) -> Callable[[], None]:
    """Set `sys.argv` and `sys.path` for the program; returns what runs it. Raises `FileNotFoundError` with a reason."""
    if module is not None:
        sys.argv = ["-m", *arguments]
        _set_first_path(os.getcwd())
        return partial(_run_module, module)
    assert script is not None
    path = os.path.join(os.getcwd(), script)  # Python does not normalise it either
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {script!r}")
    sys.argv = [script, *arguments]
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is not None:  # a directory or a zip
        _set_first_path(path)
        return partial(_execute_spec, spec)
    if os.path.isdir(path):
        raise FileNotFoundError(f"there is no __main__.py in {script!r}")
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    return partial(_run_script, path)


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """`traceback` from its first frame that is not one of _OURS on; None where there is no such frame."""
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            return traceback
        traceback = traceback.tb_next
    return None


def hide_our_frames() -> None:
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


def _context(device: str | None, cuda: bool, options: dict[str, Any]) -> AbstractContextManager[Any]:
    """What the program runs in: a context for CPU tensors, or a process with a device that has these options."""
    import fused_eager

    if device is None and not cuda:
        return fused_eager.fused_eager(**options)
    from ..frontends.device.doors import set_options

    device = device or "tpu"
    fused_eager.register(device)
    set_options(**options)
    if not cuda:
        return nullcontext()
    from ..frontends.device.as_cuda import cuda_is

    return cuda_is(device)


def _run_ranks(program: Callable[[], None], ranks: int) -> None:
    """Run the program once for each rank of this process."""
    from ..frontends.collectives import threads

    threads.run(lambda rank: program(), ranks, [os.path.abspath(sys.path[0] or os.curdir)])


def main(argv: list[str], prog: str) -> int:
    """Run the program that `argv` names. Returns 0, 1 for a module or 2 for a file or an option that cannot be used;
    `SystemExit` and whatever the program raises pass through."""
    ours, theirs = split(argv)
    arguments = _parser(prog).parse_args(ours)
    options, ranks = dict(arguments.option), arguments.ranks_in_process
    if arguments.mode is not None:
        options["mode"] = arguments.mode
    if ranks and arguments.device is None and not arguments.cuda_is_tpu:
        print(f"{prog}: --ranks-in-process is for a device: add --device tpu", file=sys.stderr)
        return 2
    try:
        resolve(options)
        program = prepare(arguments.script, arguments.module, theirs)
    except (OptionError, FileNotFoundError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    if ranks:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # where the CPU stands in, there are as many devices

    import fused_eager

    from ..log.events import LOG

    LOG.asked, entered = arguments.report, False
    try:
        with _context(arguments.device, arguments.cuda_is_tpu, options):
            entered = True
            _run_ranks(program, ranks) if ranks else program()
    except SystemExit:
        raise
    except BaseException as error:
        if not entered and isinstance(error, OptionError):  # a file or a store that turns out not to be usable
            print(f"{prog}: {error}", file=sys.stderr)
            return 2
        if arguments.module is not None and isinstance(error, ImportError) and users_part(error.__traceback__) is None:
            print(f"{prog}: {error}", file=sys.stderr)
            return 1
        hide_our_frames()
        raise
    finally:
        LOG.asked = False
        if arguments.report and entered:
            print(fused_eager.report(), file=sys.stderr)
    return 0
