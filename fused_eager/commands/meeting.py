"""A program run for the regions that it meets: what `warm` and `forecast` start, in a process of its own for each mode.

The program has the device `tpu`, simulated by the CPU; the regions go into a file. It is stopped after so many steps of
its optimizers'.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .launch import hide_our_frames, prepare, users_part


class Enough(BaseException):
    """The program has made its steps."""


def run_steps(program: Callable[[], object]) -> int:
    """Run a program to its end, or until it has made its steps; returns its exit code. What it raises goes on."""
    try:
        program()
    except Enough:
        pass
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        if isinstance(error, ImportError) and users_part(error.__traceback__) is None:  # there is no such module
            print(error, file=sys.stderr)
            return 1
        hide_our_frames()
        raise
    return 0


def main(argv: list[str]) -> int:
    """Run the program; returns its exit code."""
    split = argv.index("--")
    given, theirs = _parser().parse_args(argv[:split]), argv[split + 1 :]
    script, module = (None, theirs.pop(0)) if given.module else (theirs.pop(0), None)
    program = prepare(script, module, theirs)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    import fused_eager

    from ..compiling.met import Meetings, meeting, uncut, write
    from ..config import resolve
    from ..frontends.device.doors import set_options
    from ..targets.device import STOOD_FOR, TargetDevice
    from ..targets.target import Target
    from ..xla import use_the_cpu_alone

    use_the_cpu_alone()
    STOOD_FOR.append(target := TargetDevice(Target.parse(given.target)))
    meetings = Meetings(target, resolve().cache_salt, given.valueless)
    fused_eager.register("tpu")
    if given.mode == "whole":
        set_options(mode="fused", cache="off", max_region=1 << 20, max_pending=1 << 20)
    else:
        set_options(mode=given.mode, cache="off")
    first: list[Any] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        first[:] = first or [optimizer]
        if optimizer is first[0]:  # of several, one round of all is a step
            meetings.step += 1
            if given.steps and meetings.step >= given.steps:
                raise Enough

    register_optimizer_step_post_hook(stepped)
    began = time.perf_counter()
    with meeting(meetings), uncut() if given.mode == "whole" else nullcontext():
        try:
            code = run_steps(program)
        finally:
            fused_eager.sync()
            islands, places = _islands()
            write(
                list(meetings.found.values()),
                Path(given.to),
                steps=meetings.step,
                seconds=time.perf_counter() - began,
                islands=islands,
                places=places,
            )
    sys.stdout.flush()
    os._exit(code)  # threads of the program's would go on


def _islands() -> tuple[Counter[str], dict[str, str]]:
    """How often the host computed an op, and on which line: in plans, where each run is counted, or at once, where each
    is told."""
    from ..log.events import LOG

    told = LOG.of("island")
    named = {k.removeprefix("island "): n for k, n in LOG.counts.items() if k.startswith("island ")}
    counted = Counter({op: n for op, n in named.items() if not op.startswith("for ")})
    at_once = Counter(str(event.data["op"]) for event in told)
    return counted | at_once, {str(event.data["op"]): str(event.data["site"]) for event in told}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--to", required=True)
    parser.add_argument("--valueless", action="store_true")
    parser.add_argument("--module", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
