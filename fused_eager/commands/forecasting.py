"""`forecast`: what a program's step would take on chips that are not here, says XLA's compiler for them.

The program's first steps are run on a simulated device, once for each mode, in processes of their own, and what it
meets is compiled for the target. Nothing runs on a chip: the figures are the compiler's, for one device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fused_eager.cache import Key

from ..compiling.caching import Keeper
from ..compiling.cross import Cost, Crossed
from ..compiling.crossing import Bar, crossed
from ..compiling.met import Met
from ..config import OptionError, resolve
from ..reporting.cures import Cure, cures
from ..reporting.forecast import LIMITS, Alone, Forecast, come_late, of_mode, ops_alone, shared_out
from ..reporting.source import short
from ..reporting.text import amount, duration
from ..targets.target import Target, TargetError
from ..targets.topology import NoCompiler
from ..xla import use_the_cpu_alone
from .warming import CannotRun, add_program, meet, target_of, warmed

ROWS = 8


def forecast(given: argparse.Namespace, target: Target, keeper: Keeper) -> tuple[Forecast, list[Cure], dict[str, str]]:
    """The forecast of a program, what would make it faster, and what could not be compiled. Raises CannotRun."""
    met: dict[str, tuple[list[Met], dict[str, Any]]] = {mode: meet(given, mode) for mode in LIMITS}
    every = {m.key: m for found, _ in met.values() for m in found}
    costs: dict[Key, Cost] = {}
    done = warmed(list(every.values()), target, keeper, given.jobs, costs)
    found, about = met["fused"]
    steps = about["steps"]
    alone = ops_alone(met["strict"][0], met["strict"][1]["steps"], costs)
    made = Forecast(
        target,
        [of_mode(name, rows, told["steps"], costs) for name, (rows, told) in met.items()],
        shared_out(found, steps, costs, alone, lambda op: op.line),
        shared_out(found, steps, costs, alone, lambda op: op.module or "outside of modules"),
        {op: n for op, n in about["islands"].items() if not op.startswith("for ")},
        alone,
        come_late(found, steps),
    )

    def what_if(rows: Sequence[Alone], precision: str) -> Mapping[Key, float]:
        others = {}
        for row in rows:
            numerics = {**row.key.parts["numerics"], "float32_matmul_precision": precision}
            others[Key({**row.key.parts, "numerics": numerics})] = row.key
        bar, seconds = Bar(len(others), "products in other precision"), {}
        for key, outcome in crossed(list(others), target, given.jobs):
            bar.step()
            if isinstance(outcome, Crossed):
                seconds[others[key]] = outcome.cost.seconds
        return seconds

    return made, cures(made, what_if), done.failed


def told(made: Forecast, found: Sequence[Cure], failed: Mapping[str, str]) -> str:
    """The forecast as text."""
    chip = made.target.chip
    lines = [
        f"One step on one device of {made.target} ({chip.kind}: {chip.flops / 1e12:.0f} Tflop/s in bfloat16, "
        f"{amount(chip.hbm)} at {chip.bandwidth / 1e9:.0f} GB/s), as XLA's compiler expects it.",
        "Time between launches is not in it, nor is what it has no figure for (unjudged instructions).",
        "",
        f"{'mode':<8}{'time':>10}{'unjudged':>10}{'launches':>10}{'memory':>10}{'of chip':>9}{'moved':>10}"
        f"{'Gflop':>9}{'of peak':>9}",
    ]
    for mode in made.modes:
        lines.append(
            f"{mode.name:<8}{duration(mode.seconds):>10}{mode.unjudged:>10}{mode.launches:>10}"
            f"{amount(mode.memory):>10}{mode.memory / chip.hbm:>9.0%}{amount(mode.bytes):>10}"
            f"{mode.flops / 1e9:>9.3g}{mode.share(made.target):>9.1%}  {LIMITS[mode.name]}"
        )
    for title, share in (("by line", made.lines), ("by module", made.modules)):
        total = sum(share.values()) or 1.0
        lines += ["", f"Where the time goes, fused, {title}:"]
        lines += [
            f"  {seconds / total:>5.0%} {duration(seconds):>9}  {short(name) if title == 'by line' else name}"
            for name, seconds in list(share.items())[:ROWS]
        ]
    lines += ["", "What would make it faster:" if found else "Nothing was found that would make it faster."]
    for cure in found:
        all_of_it = duration(made.mode("strict").seconds)
        gain = f"{duration(cure.seconds)} of {all_of_it} one op at a time" if cure.seconds else ""
        lines.append(f"  {short(cure.line)}  {cure.fault}".rstrip())
        lines.append(f"      {cure.cure}{f': gains about {gain}' if gain else ''}")
    if failed:
        lines += ["", "What could not be compiled, and is left out of the figures:"]
        lines += [f"  {name}: {why}" for name, why in failed.items()]
    return "\n".join(lines)


def main(argv: list[str], prog: str) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    add_program(parser)
    given = parser.parse_args(argv)
    if given.script is None:
        parser.error("which program? give SCRIPT")
    use_the_cpu_alone()
    try:
        target = target_of(given.target)
        made, found, failed = forecast(given, target, Keeper(resolve()))
    except (OptionError, TargetError, NoCompiler) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except CannotRun as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    if given.json:
        about = {
            "target": str(target),
            "modes": [{**asdict(mode), "share_of_peak": mode.share(target)} for mode in made.modes],
            "lines": made.lines,
            "modules": made.modules,
            "advice": [asdict(cure) for cure in found],
            "failed": failed,
        }
        print(json.dumps(about, indent=2))
    else:
        print(told(made, found, failed))
    return 0
