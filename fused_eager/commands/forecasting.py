"""`forecast`: what a program's step would take on chips that are not here, says XLA's compiler for them.

The program's first steps are run on a simulated device, once for each mode, in processes of their own, and what it
meets is compiled for the target. Nothing runs on a chip: the figures are the compiler's, for one device.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fused_eager.cache import Key

from ..compiling.caching import Keeper
from ..compiling.cross import Cost
from ..compiling.met import Met
from ..config import OptionError, resolve
from ..reporting.cures import Cure, cures
from ..reporting.forecast import LIMITS, Forecast, come_late, of_mode, ops_alone, shared_out, steady
from ..reporting.forecast_views import as_html, as_text
from ..targets.links import LINKS
from ..targets.target import Target, TargetError
from ..targets.topology import NoCompiler
from ..xla import use_the_cpu_alone
from .pods import run as on_pods
from .scaling import numbers, run
from .warming import CannotRun, add_program, give_up, meet, target_of, warmed


def forecast(given: argparse.Namespace, target: Target, keeper: Keeper) -> tuple[Forecast, list[Cure], dict[str, str]]:
    """The forecast of a program, what would make it faster, and what could not be compiled. Raises CannotRun."""
    modes = [mode for mode in LIMITS if mode != "whole" or not given.no_whole]
    met: dict[str, tuple[list[Met], dict[str, Any]]] = {mode: meet(given, mode) for mode in modes}
    # What the program does before its steps, as initialising, is in no figure.
    step = {name: m for found, told in met.values() for name, (m, _) in steady(found, told["steps"]).items()}
    costs: dict[Key, Cost] = {}
    done = warmed(list(step.values()), target, keeper, given.jobs, costs)
    found, about = met["fused"]
    steps = about["steps"]
    alone = ops_alone(met["strict"][0], met["strict"][1]["steps"], costs)
    made = Forecast(
        target,
        [of_mode(name, rows, told["steps"], costs) for name, (rows, told) in met.items()],
        shared_out(found, steps, costs, alone, lambda op: op.line),
        shared_out(found, steps, costs, alone, lambda op: op.module or "outside of modules"),
        about["islands"],
        about["places"],
        alone,
        come_late(found, steps),
    )

    return made, cures(made), done.failed


def main(argv: list[str], prog: str) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--html", metavar="FILE", help="write a page too")
    parser.add_argument(
        "--ranks", type=numbers, help="a step on so many ranks instead, with commas, as in 8,64,512 (needs no target)"
    )
    parser.add_argument(
        "--link",
        default="gloo",
        help=f"with --ranks: {', '.join(LINKS)}, or us and GB/s as in 10,12.5 (default: gloo, measured here)",
    )
    parser.add_argument(
        "--compute", type=float, default=1.0, help="with --ranks: how many times as long as here computing takes"
    )
    parser.add_argument("--mesh", help="a step on all chips of a mesh of the target's instead, as data=64,model=16")
    parser.add_argument(
        "--split", help="with --mesh: the dimensions of the step's arguments that an axis divides, as 512=data"
    )
    parser.add_argument(
        "--no-whole", action="store_true", help="leave out the row 'whole': its regions are large, and compile longest"
    )
    add_program(parser, needs_target=False)
    given = parser.parse_args(argv)
    if given.script is None:
        parser.error("which program? give SCRIPT")
    if given.ranks:
        for name in ("target", "html", "valueless", "mesh", "split", "no_whole"):
            if getattr(given, name):
                flag = name.replace("_", "-")
                parser.error(f"--{flag} is not for --ranks: what a rank computes is measured (--compute changes it)")
        return run(given, prog)
    if given.target is None:
        parser.error("for which chips? give --target, or --ranks")
    if (given.mesh is None) != (given.split is None):
        parser.error("--mesh and --split go together: which axes there are, and what each divides")
    if given.mesh:
        return on_pods(given, prog)
    use_the_cpu_alone()
    try:
        target = target_of(given.target)
        if given.html and not os.access(Path(given.html).resolve().parent, os.W_OK):
            raise FileNotFoundError(f"--html {given.html}: there is no folder that can be written to")
        made, found, failed = forecast(given, target, Keeper(resolve()))
    except (OptionError, TargetError, NoCompiler, OSError, CannotRun) as error:
        return give_up(prog, error)
    if given.json:
        about = {
            "target": str(target),
            "uncounted": made.uncounted,
            "modes": [{**asdict(mode), "share_of_peak": mode.share(target)} for mode in made.modes],
            "lines": made.lines,
            "modules": made.modules,
            "advice": [asdict(cure) for cure in found],
            "failed": failed,
        }
        print(json.dumps(about, indent=2))
    else:
        print(as_text(made, found, failed))
    if given.html:
        program = " ".join([given.script, *given.arguments])
        Path(given.html).write_text(as_html(program, made, found, failed), encoding="utf-8")
    return 0
