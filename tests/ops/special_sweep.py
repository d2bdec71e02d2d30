"""Run special values through torch's op corpus, and count: `python -m tests.ops.special_sweep sin --dtypes float64`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter

import torch

from fused_eager.tracing import trace

from .corpus import OPS, Case, cases, excluded
from .special_exclusions import UNRUN
from .special_patterns import patterns_of
from .specials import compared


def cases_of(names: list[str], dtype: torch.dtype, mode: str, chained: bool = False) -> list[Case]:
    """One case of each op: with gradients, where there are any, and those come with the results."""
    chosen = []
    for name in names:
        every = cases([name], (dtype,), (mode,), (False, True), (chained,))
        found = {case.grad: case for case in every if case.op == name}
        if found:
            chosen.append(found.get(True) or found[False])
    return chosen


def patterns_to_run(case: Case, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the patterns that eager survives."""
    return tuple(pattern for pattern in patterns if (OPS[case.op].name, pattern) not in UNRUN)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.special_sweep", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of op_db; none for all")
    parser.add_argument("--dtypes", default="float32", help="with commas")
    parser.add_argument("--modes", default="strict", help="with commas")
    parser.add_argument("--samples", type=int, default=3, help="of each case")
    parser.add_argument("--chained", action="store_true", help="with three ops before and after")
    parser.add_argument("--patterns", default="", help="with commas; all of the dtype's")
    parser.add_argument("--shard", default="0/1", help="number/of")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    number, of = map(int, args.shard.split("/"))
    names = [
        n for i, n in enumerate(OPS)
        if i % of == number and (not args.names or n in args.names or OPS[n].name in args.names)
    ]  # fmt: skip
    counts: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    began = time.perf_counter()
    for dtype in (getattr(torch, name) for name in args.dtypes.split(",")):
        patterns = tuple(args.patterns.split(",")) if args.patterns else patterns_of(dtype)
        for mode in args.modes.split(","):
            for case in cases_of(names, dtype, mode, args.chained):
                if excluded(case):
                    counts["excluded ops"] += 1
                    continue
                counts["ops"] += 1
                for pattern, sample, found, row in compared(case, args.samples, patterns_to_run(case, patterns)):
                    counts["runs"] += 1
                    counts["differ"] += bool(found.kind)
                    if row is not None:
                        rows[f"{found.kind}: {row.reason}"] += 1
                    elif found.kind:
                        counts["not accepted"] += 1
                        print(f"FAIL {case}: {pattern}, {sample}: {found.kind}: {found.text}", flush=True)
                trace.MEMORY.forget()
                gc.collect()
    for text, times in rows.most_common():
        print(f"accepted {times}: {text}")
    seconds = time.perf_counter() - began
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())), f"({seconds:.0f} s)", flush=True)
    return int(bool(counts["not accepted"]))


if __name__ == "__main__":
    sys.exit(main())
