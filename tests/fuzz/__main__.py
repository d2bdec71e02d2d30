"""Fuzz the runtime against eager: `python -m tests.fuzz --programs 1000 --seed 7`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from contextlib import nullcontext

import torch

from fused_eager.devices.host import scratch
from fused_eager.lowering.xla_cpu import row_blocks, stages
from fused_eager.tracing import trace
from tests.streams import BLOCKS_OF_ALL_SIZES, RESULTS_OF_ALL_SIZES, STAGES_OF_ALL_LENGTHS, given_up_anywhere, restless

from .differ import Invalid, check, repaired, shrink
from .generate import Program, generate
from .kinds import KINDS


def one(seed: int, mode: str, kinds: tuple[str, ...] = ()) -> tuple[Program | None, str]:
    """The program of a seed that eager runs (None: there is none), and how a mode differs from eager."""
    program = repaired(generate(seed, kinds))
    if program is None:
        return None, ""
    try:
        return program, check(program, mode)
    except Invalid:
        return None, ""


def _kinds(text: str) -> tuple[str, ...]:
    """What the command line names: kinds of statements."""
    names = tuple(KINDS) if text == "all" else tuple(text.split(","))
    if not set(names) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text} is not all, and no list of {', '.join(KINDS)}")
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--modes", default="fused", help="comma-separated")
    parser.add_argument("--kinds", type=_kinds, default=(), help=f"further statements: all, or {','.join(KINDS)}")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--scratch", action="store_true", help="results of all sizes go to memory that is used again")
    parser.add_argument("--blocks", action="store_true", help="rows of all sizes are cut into blocks")
    parser.add_argument("--stages", action="store_true", help="the same, and what may be stored within a block is")
    parser.add_argument("--give-up", action="store_true", help="streams are given up anywhere (modes: auto)")
    parser.add_argument("--restless", action="store_true", help="torch runs alone from any turn on, and up to any")
    args = parser.parse_args(argv)
    with (
        given_up_anywhere(args.seed) if args.give_up else nullcontext(),
        restless(args.seed) if args.restless else nullcontext(),
    ):
        return fuzz(args)


def fuzz(args: argparse.Namespace) -> int:
    """Run the programs that were asked for. Returns 1 if one of them differs from eager."""
    if args.scratch:
        vars(scratch).update(RESULTS_OF_ALL_SIZES)
    if args.stages:
        vars(stages).update(STAGES_OF_ALL_LENGTHS)
    if args.blocks or args.stages:
        vars(row_blocks).update(BLOCKS_OF_ALL_SIZES)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    for seed in range(args.seed, args.seed + args.programs):
        if time.perf_counter() - started > args.seconds:
            break
        for mode in args.modes.split(","):
            program, found = one(seed, mode, args.kinds)
            if program is None:
                counts["left out"] += 1
                continue
            counts["programs"] += 1
            counts["statements"] += program.statements()
            if found:
                counts["mismatches"] += 1
                print(f"MISMATCH seed {seed} mode {mode}: {found[:600]}", flush=True)
                if not args.no_shrink:
                    raised = "raises" in found

                    def fails(p: Program, mode: str = mode, raised: bool = raised) -> bool:
                        told = check(p, mode)
                        return bool(told) and ("raises" in told) == raised

                    small = shrink(program, fails)
                    print(f"{check(small, mode)[:600]}\n{small.script(mode)}", flush=True)
        if seed % 50 == 49:
            trace.MEMORY.forget()
            gc.collect()
            seconds = time.perf_counter() - started
            print(f"  seed {seed}: {dict(counts)} in {seconds:.0f} s", file=sys.stderr, flush=True)
    print(f"{counts['programs']} programs of {counts['statements']} statements, {counts['mismatches']} mismatches, "
          f"{counts['left out']} left out, {time.perf_counter() - started:.0f} s")
    return 1 if counts["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
