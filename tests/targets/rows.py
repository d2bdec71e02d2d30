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
from collections.abc import Sequence
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


def compiled(op: str, calls: dict[str, Any], target: str) -> Row:
    """Compile the calls of a row for a target."""
    from fused_eager.compiling.cross import cross_compile
    from fused_eager.targets.device import TargetDevice
    from fused_eager.targets.target import Target

    device = TargetDevice(Target.parse(target))
    row = Row(op)
    began = time.perf_counter()
    for name, computation in calls.items():
        try:
            cross_compile(computation, True, device)
            row.calls += 1
        except Exception as error:
            row.refused[name] = short(f"{type(error).__name__}: {error}")
    row.seconds = time.perf_counter() - began
    return row


def short(text: str) -> str:
    """A reason in one line, without what differs from run to run."""
    return re.sub(r"\s+", " ", text)[:240]


def main() -> None:
    """Compile, and print a row as JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="v5e:2x2")
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    part, parts = map(int, given.shard.split("/"))
    began = time.perf_counter()
    calls = recorded(given.names, given.dtypes.split(","), given.samples)
    count, seconds = sum(map(len, calls.values())), time.perf_counter() - began
    print(f"{len(calls)} rows, {count} calls, recorded in {seconds:.0f} s", file=sys.stderr)
    for number, op in enumerate(sorted(calls)):
        if number % parts == part:
            row = compiled(op, calls[op], given.target)
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
