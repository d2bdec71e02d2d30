"""Sweep torch's op corpus through the runtime: `python -m tests.ops sin add --dtypes float32,int64 --backward`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter

import torch

from fused_eager.tracing import trace

from . import corpus
from .corpus import OPS, Case, Tally, cases, check_errors, sweep


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of op_db; none for all")
    parser.add_argument("--dtypes", default="float32", help="comma-separated, or 'all'")
    parser.add_argument("--modes", default="fused", help="with commas; auto: fused, each sample met for the first time")
    parser.add_argument("--backward", action="store_true", help="gradients too, where op_db says so")
    parser.add_argument("--chained", action="store_true", help="with three ops before and after")
    parser.add_argument("--errors", action="store_true", help="the error inputs instead of the samples")
    parser.add_argument("--limit", type=int, default=1000, help="samples per case")
    parser.add_argument("--shard", default="0/1", help="number/of")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dtypes = corpus.DTYPES if args.dtypes == "all" else tuple(getattr(torch, d) for d in args.dtypes.split(","))
    number, of = map(int, args.shard.split("/"))
    names = [n for i, n in enumerate(OPS) if i % of == number and (
        not args.names or n in args.names or OPS[n].name in args.names)]
    tally = Tally()
    started = time.perf_counter()

    def told(text: str) -> None:
        print(text, flush=True)

    for name in names:
        if args.errors:
            for mode in args.modes.split(","):
                tally.counts["cases"] += 1
                for text in check_errors(name, mode):
                    tally.failures.append((Case(name, torch.float32, mode), 0, text))
                    told(f"FAIL {name} {mode} {text}")
            continue
        chosen = cases([name], dtypes, tuple(args.modes.split(",")), (args.backward,), (args.chained,))
        begun = time.perf_counter()
        try:
            sweep(chosen, args.limit, tally, told)
        except Exception as error:
            told(f"CRASH {name}: {type(error).__name__}: {error}")
            tally.failures.append((Case(name, dtypes[0]), -1, str(error)))
        if time.perf_counter() - begun > 20:
            told(f"slow: {name} {time.perf_counter() - begun:.0f} s")
        trace.MEMORY.forget()
        gc.collect()
    print(Counter(case.op for case, _, _ in tally.failures))
    print(f"{tally} ({time.perf_counter() - started:.0f} s)")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
