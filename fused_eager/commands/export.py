"""`export`: a program that torch has exported (`torch.export.save`) becomes a folder that plain JAX runs."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str], prog: str) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("program", metavar="PROGRAM", help="what torch.export.save has written")
    parser.add_argument("folder", metavar="FOLDER", help="is made anew")
    parser.add_argument("--platforms", default="cpu,cuda,tpu", help="what it is to run on (default: %(default)s)")
    parser.add_argument("--weights", default="separate", help="separate files, or inside the program")
    parser.add_argument("--target", action="append", default=[], help="TPUs to write an executable for, as v5e:2x2")
    given = parser.parse_args(argv)
    import torch

    from .. import export
    from ..errors import FusedEagerError

    try:
        program = torch.export.load(given.program)
        made = export(program, (), given.folder, platforms=given.platforms.split(","), weights=given.weights,
                      target=given.target)  # fmt: skip
    except (FusedEagerError, ValueError, OSError) as why:
        print(f"{prog}: {why}", file=sys.stderr)
        return 1
    print(made)
    return 0
