"""The command `explain`: run a program once, and say what became of each of its lines."""

from __future__ import annotations

import argparse
import sys
import time

from ..reporting.explaining import Explanation, _with_plans, watching
from ..reporting.report import Report
from . import launch


def main(argv: list[str], prog: str) -> int:
    """`explain SCRIPT`: run a program once under fused_eager() and say what became of each of its lines."""
    ours, theirs = launch.split(argv)
    parser = argparse.ArgumentParser(prog=prog, description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--mode", default="fused", help="debug, strict or fused (default)")
    program = parser.add_mutually_exclusive_group(required=True)
    program.add_argument("-m", dest="module", metavar="MODULE", help="a module, as python -m takes it")
    program.add_argument("script", nargs="?", metavar="SCRIPT", help="a file")
    arguments = parser.parse_args(ours)
    start = time.perf_counter()
    name = ["-m", arguments.module] if arguments.module is not None else [arguments.script]
    with watching() as seen:
        try:
            code = launch.main(["--mode", arguments.mode, "--option", "compile=wait", *name, *theirs], prog)
        finally:
            found = Report.of([_with_plans(seen, start)])
            print(f"{Explanation(None, found)}\n\n{found}", file=sys.stderr)
    return code
