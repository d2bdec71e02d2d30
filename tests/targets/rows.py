"""Every row of the fusion rules, lowered and compiled for a TPU by XLA's real compiler: `python -m tests.targets.rows`.

The calls are those of torch's op corpus, forward and backward, recorded one op at a time and not run: one for each row
and dtype. Those that the corpus has no call of are called by hand (`calls`).
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ONE_IN = 12  # rows of the sample
DTYPES = (
    "float32", "bfloat16", "float16", "int32", "int64", "int16", "int8", "uint8", "bool", "complex64",
    "float64", "complex128",
)  # fmt: skip

WIDE = (
    "## float64 and complex128",
    "",
    "| dtype | on a TPU |",
    "|---|---|",
    "| float64 | XLA makes a number of two of float32, which is slow. What it lacks in that form (taking a number "
    "apart, LU decompositions, Fourier transforms) the host computes: [which rows](platforms.md) |",
    "| complex128 | XLA's compiler ends its process, so no op of it is lowered. The host computes each, as an island; "
    'with `islands="refuse"` the op is refused, with its line |',
    "",
)


@dataclass
class Row:
    """What became of a row for a target: seconds of the compiler's for each dtype whose call compiled, and refusals."""

    op: str
    target: str = ""
    compiled: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def recorded(names: Sequence[str], dtypes: Sequence[str], samples: int) -> dict[str, dict[str, Any]]:
    """The calls of the rows, as computations by dtype: one for each. Of the entries and rows named, or of all.

    Rows that the corpus has no call of, and those named, are called by hand.
    """
    import torch
    from fused_eager.fusion_rules import RULES
    from fused_eager.fusion_rules.rule import rule_for

    from fused_eager import fused_eager
    from fused_eager.executing import load
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
        for name in () if names else [name for name in dtypes if name in ("float32", "bfloat16")]:
            _run_lists(getattr(torch, name), fused_eager)
        by_hand = [row for row in RULES if (row.removeprefix("aten.") in names if names else row not in calls)]
        for name in dtypes if by_hand else ():
            _run_by_hand(by_hand, getattr(torch, name), fused_eager, lambda row, name=name: name in calls.get(row, ()))
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


def _run_lists(dtype: Any, context: Any) -> None:
    """Ops on lists of tensors, which the corpus keeps elsewhere: their arguments follow from the overload."""
    import torch
    from fused_eager.fusion_rules import RULES

    lists, numbers, number = [torch.ones(3, 4, dtype=dtype), torch.ones(5, dtype=dtype)], [2.0, 3.0], torch.tensor(2.0)
    last = {"Scalar": [2.0], "ScalarList": [numbers], "List": [lists], "Tensor": [number], "default": []}
    skipped: list[Exception] = []
    for row in [row for row in RULES if row.startswith("aten._foreach_")]:
        _, op, overload = row.split(".")
        more = [lists, lists] if op.startswith(("_foreach_addc", "_foreach_lerp")) else []
        call = getattr(getattr(torch.ops.aten, op), overload)
        for given in ([*more, *last.get(overload, [])], [*more[:1], *last.get(overload, [])], [lists]):
            try:
                with context(mode="strict", progress=False, cache="off", native="never", compile="wait"):
                    call(lists, *given)
                break
            except Exception as error:
                skipped.append(error)


def _run_by_hand(rows: Sequence[str], dtype: Any, context: Any, met: Callable[[str], bool]) -> None:
    """Call rows until each is met: on CPU tensors, and on the device, which takes calls that ATen has for no CPU. Some
    are met in inference mode alone."""
    import torch

    import fused_eager
    from fused_eager.frontends.device.doors import set_options

    from .calls import call_of

    fused_eager.register("tpu")
    set_options(mode="strict", cache="off")
    refused: list[Exception] = []
    for device, inference in (("cpu", False), ("tpu", False), ("cpu", True), ("tpu", True)):
        door = context(mode="strict", progress=False, cache="off", native="never", compile="wait")
        for row in [row for row in rows if not met(row)]:
            try:
                with torch.inference_mode(inference), door if device == "cpu" else nullcontext():
                    call_of(row, dtype, device)
                    fused_eager.sync()
            except Exception as error:  # it is not for this dtype, or not for this device
                refused.append(error)


def merged(rows: Sequence[Row]) -> list[Row]:
    """What several runs said of each row and target, the last word for each dtype."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = found.setdefault((row.target, row.op), Row(row.op, row.target))
        for name in row.compiled.keys() | row.refused.keys():
            known.compiled.pop(name, None)
            known.refused.pop(name, None)
        known.compiled.update(row.compiled)
        known.refused.update(row.refused)
    return list(found.values())


def as_markdown(rows: Sequence[Row], known: Sequence[str]) -> str:
    """docs/tpu_ops.md. The first target is the one that all rows were compiled for; the others are a sample."""
    rows = merged(rows)
    targets = list(dict.fromkeys(row.target for row in rows))
    whole = [row for row in rows if row.target == targets[0]]
    without = sorted(set(known) - {row.op for row in whole})
    lines = [
        "# Which ops compile for a TPU",
        "",
        "Generated by `make test-tpu`: each row of the fusion rules, on calls of torch's op corpus, forward and",
        "backward, and on calls by hand where that has none, was compiled by XLA's own compiler for TPUs. Nothing was",
        "run. What is refused runs on the host, as an island. Seconds are of the clock: on a busy host they say",
        "little.",
        "",
        "| target | rows | calls that compiled | refused | seconds of the compiler's |",
        "|---|---|---|---|---|",
    ]
    for target in targets:
        of = [row for row in rows if row.target == target]
        name = target if target == targets[0] else f"{target}, a sample"
        done, refused = sum(len(row.compiled) for row in of), sum(len(row.refused) for row in of)
        lines.append(f"| {name} | {len(of)} | {done} | {refused} | {sum(sum(r.compiled.values()) for r in of):.0f} |")
    names = [name for name in DTYPES if any(name in row.compiled or name in row.refused for row in whole)]
    lines += ["", f"By dtype, for {targets[0]}:", "", "| dtype | compiled | refused | seconds |", "|---|---|---|---|"]
    for name in names:
        took = [row.compiled[name] for row in whole if name in row.compiled]
        lines.append(f"| {name} | {len(took)} | {sum(name in row.refused for row in whole)} | {sum(took):.0f} |")
    others = f"The figures above are of the other {len(names)} dtypes."
    slow = sorted(((s, row.op, name) for row in whole for name, s in row.compiled.items()), reverse=True)[:5]
    lines += [
        "",
        f"The longest: {', '.join(f'`{_plain(op)}` in {name} {s:.0f} s' for s, op, name in slow)}.",
        "",
        *WIDE,
        *([] if any(row.split()[1] in names for row in WIDE[4:-1]) else [others, ""]),
        "## What is refused",
        "",
        "| row | dtype | why |",
        "|---|---|---|",
    ]
    whys: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for name, why in row.refused.items():
            if row.target == targets[0] or row.op not in {r.op for r in whole if name in r.refused}:
                where = "" if row.target == targets[0] else f" ({row.target})"
                whys[row.op + where, why].append(name)
    everywhere = {why for (_, why) in whys if sum(w == why for _, w in whys) > 40}
    for why in sorted(everywhere):
        dtypes = sorted({name for (_, w), found in whys.items() if w == why for name in found})
        lines.append(f"| all | {', '.join(dtypes)} | {why} |")
    lines += [
        f"| {_plain(op)} | {', '.join(names)} | {why.replace('|', '/')} |"
        for (op, why), names in sorted(whys.items())
        if why not in everywhere
    ]
    lines += ["", "## Rows without a call", ""]
    lines += [f"{len(without)} of {len(known)} rows have no call in the corpus, and none by hand.", ""]
    return "\n".join([*lines, ", ".join(f"`{_plain(op)}`" for op in without)]) + "\n"


def refused_on(page: str) -> set[tuple[str, str]]:
    """The rows and dtypes that a page says are refused; a row "all" is there for each."""
    table = page.partition("## What is refused")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("| ")]
    return {(op, name) for op, names in cells[1:] for name in names.split(", ")}


def newly_refused(rows: Sequence[Row], page: str) -> list[str]:
    """What rows were refused that the page knows nothing of, in words."""
    known = refused_on(page)
    return [
        f"{_plain(row.op)} in {name}: {why}"
        for row in rows
        for name, why in row.refused.items()
        if not {(_plain(row.op), name), ("all", name)} & known
    ]


def _plain(op: str) -> str:
    return op.removeprefix("aten.")


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
    rows, of, left = {op: Row(op, target) for op in calls}, {}, {op: len(found) for op, found in calls.items()}
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
                row.compiled[name] = outcome.seconds
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
    parser.add_argument("--others", default="", metavar="TARGETS", help="with commas: one row in 12 for these")
    parser.add_argument("--dtypes", default="float32", help="with commas, or all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--write", metavar="FILE", help="the page about the rows")
    parser.add_argument("--read", nargs="*", metavar="FILE", help="compile nothing: take what earlier runs printed")
    parser.add_argument("--against", metavar="FILE", help="fail if a row is refused that this page does not list")
    parser.add_argument("names", nargs="*", help="entries of the corpus, or rows: those are called by hand")
    given = parser.parse_args()
    from fused_eager.xla import use_the_cpu_alone

    use_the_cpu_alone()
    if given.read:
        texts = [line for file in given.read for line in Path(file).read_text().splitlines()]
        _write([Row(**json.loads(line)) for line in texts], given.write)
        return
    part, parts = map(int, given.shard.split("/"))
    began = time.perf_counter()
    dtypes = DTYPES if given.dtypes == "all" else given.dtypes.split(",")
    calls = recorded(given.names, dtypes, given.samples)
    count, seconds = sum(map(len, calls.values())), time.perf_counter() - began
    print(f"{len(calls)} rows, {count} calls, recorded in {seconds:.0f} s", file=sys.stderr)
    chosen = {op: found for number, (op, found) in enumerate(sorted(calls.items())) if number % parts == part}
    sample = dict(list(chosen.items())[::ONE_IN])
    rows = []
    for target, some in [(given.target, chosen), *((other, sample) for other in given.others.split(",") if other)]:
        for row in compiled(some, target, given.jobs):
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
    _write(rows, given.write)
    if given.against is not None:
        new = newly_refused(rows, Path(given.against).read_text())
        print(f"{len(rows)} rows, {len(new)} refused that {given.against} does not list", *new, sep="\n")
        sys.exit(bool(new))


def _write(rows: Sequence[Row], file: str | None) -> None:
    from fused_eager.fusion_rules import RULES

    if file is not None:
        Path(file).write_text(as_markdown(rows, list(RULES)))


if __name__ == "__main__":
    main()
