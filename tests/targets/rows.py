"""Every row of the fusion rules, lowered and compiled for a TPU by XLA's real compiler: `python -m tests.targets.rows`.

The calls are those of torch's op corpus, forward and backward, recorded one op at a time and not run: one for each row
and dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "bool", "complex64", "float64", "complex128")


@dataclass
class Row:
    """What became of one row: the calls that compiled, the seconds of the compiler's, and the refusals by dtype."""

    op: str
    calls: int = 0
    seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)


def recorded(names: Sequence[str], dtypes: Sequence[str], samples: int) -> dict[str, dict[str, Any]]:
    """The calls of the rows, as computations by dtype: one for each. Of the entries named, or of all."""
    import torch
    from fused_eager.fusion_rules.rule import rule_for

    from fused_eager import fused_eager
    from fused_eager.running import load
    from tests.op_db import OP_DB

    calls: dict[str, dict[str, Any]] = defaultdict(dict)
    name = ""

    def note(computation: Any, settings: Any) -> Any:
        for node in computation.chosen:
            rule = rule_for(node.twin)
            if rule is not None:
                calls[rule.op].setdefault(name, computation)
        raise RuntimeError("recorded, not run")

    real, load.load_or_compile = load.load_or_compile, note
    try:
        for info in OP_DB:
            if names and info.name not in names:
                continue
            for name in dtypes:
                dtype = getattr(torch, name)
                if dtype not in info.supported_dtypes("cpu"):
                    continue
                grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _run(info, dtype, grad, samples, fused_eager)
    finally:
        load.load_or_compile = real
    return calls


def _run(info: Any, dtype: Any, grad: bool, samples: int, context: Any) -> None:
    import torch

    torch.manual_seed(0)
    try:
        found = list(info.sample_inputs("cpu", dtype, requires_grad=grad))
    except Exception:  # not for this machine
        return
    # The first ones are often empty.
    found = sorted(found, key=lambda s: -_numel(s.input))[:samples]
    skipped: list[Exception] = []
    for sample in found:
        try:
            with context(mode="strict", progress=False, cache="off", native="never", compile="wait"):
                out = info.op(sample.input, *sample.args, **sample.kwargs)
                outs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
                for t in outs:
                    if grad and t.requires_grad:
                        t.sum().abs().backward(retain_graph=True)
        except Exception as error:  # whatever eager raises for a sample that it does not take
            skipped.append(error)


def _numel(tree: Any) -> int:
    import torch

    if isinstance(tree, torch.Tensor):
        return tree.numel()
    return sum(map(_numel, tree)) if isinstance(tree, (tuple, list)) else 0


def compiled(calls: dict[str, dict[str, Any]], target: str, jobs: int) -> Iterator[Row]:
    """Compile the calls of all rows for a target; a row comes when its last call is done."""
    from fused_eager.cache import Key, Unencodable

    from fused_eager.compiling import canonical, surroundings
    from fused_eager.compiling.cross import Refusal
    from fused_eager.compiling.crossing import Bar, crossed
    from fused_eager.targets.device import TargetDevice
    from fused_eager.targets.target import Target

    device = TargetDevice(Target.parse(target))
    around = surroundings.parts(True, "", device)
    rows, of, left = {op: Row(op) for op in calls}, {}, {op: len(found) for op, found in calls.items()}
    for op, found in sorted(calls.items()):
        for name, computation in found.items():
            try:
                of.setdefault(Key({"region": canonical.to_parts(computation), **around}), []).append((op, name))
            except Unencodable as error:
                rows[op].refused[name] = f"it has no key: {error}"
                left[op] -= 1
    bar = Bar(len(of), f"rows for {target}")
    for key, outcome in crossed(list(of), device.target, jobs):
        bar.step(isinstance(outcome, Refusal))
        for op, name in of[key]:
            row = rows[op]
            left[op] -= 1
            if isinstance(outcome, Refusal):
                row.refused[name] = short(outcome.reason)
            else:
                row.calls += 1
                row.seconds += outcome.seconds
            if not left[op]:
                yield row


def short(text: str) -> str:
    """A reason in one line, without what differs from run to run."""
    return re.sub(r"\s+", " ", text)[:240]


def main() -> None:
    """Compile, and print a row as JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="v5e:2x2")
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    from fused_eager.xla import use_the_cpu_alone

    use_the_cpu_alone()
    part, parts = map(int, given.shard.split("/"))
    began = time.perf_counter()
    calls = recorded(given.names, given.dtypes.split(","), given.samples)
    count, seconds = sum(map(len, calls.values())), time.perf_counter() - began
    print(f"{len(calls)} rows, {count} calls, recorded in {seconds:.0f} s", file=sys.stderr)
    chosen = {op: found for number, (op, found) in enumerate(sorted(calls.items())) if number % parts == part}
    for row in compiled(chosen, given.target, given.jobs):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
