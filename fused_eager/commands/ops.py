"""`python -m fused_eager ops`: which of torch's ops run through XLA, and why the others do not.

The table is measured, not looked up: each entry of op_db (torch's own corpus of ops) is run under the runtime, and what
ran in regions, what ran as an island and what ran natively is read off the event log and a mode beneath the front door.
Regions are lowered; XLA compiles them only if that is asked for. Without op_db (it needs the package expecttest) the
rows of the fusion rules are listed.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fused_eager.fusion_rules.lowering import leaves

from ..executing.load import ISLANDS
from ..frontends.context.context import fused_eager
from ..frontends.context.intercept import Watcher
from ..log.events import LOG, Event
from ..progress import waiting
from ..tracing.calls import TINY
from ..tracing.opinfo import Kind, info_of
from .lowered import lowered_only

# How an entry ran, from best to worst, and what that means.
HOW: Mapping[str, str] = {
    "xla": "all that it computes runs in regions that XLA compiled",
    "view": "nothing is computed: a view, a query or bare memory",
    "random": "draws random numbers through ATen, in program order, so that a seed gives eager's numbers",
    "values": "its result depends on values (a shape, a Python number, an error): a sync point, run by ATen",
    "island": "at least one of its ops runs through ATen between XLA regions",
    "none": "op_db has no sample for it",
}
LOWERED = ("xla", "view")


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of op_db: how its samples ran, and why not in XLA ("" if they did)."""

    op: str
    how: str
    why: str


class _Beneath(Watcher):
    """Entered before the context, so it sees what the front door does not defer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, str] = {}  # op -> how

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = info_of(func).kind if isinstance(func, torch._ops.OpOverload) else Kind.CUSTOM
        if kind is Kind.RANDOM:
            self.seen[str(func)] = "random"
        elif kind in (Kind.VALUES, Kind.CHECK):
            self.seen[str(func)] = "values"
        elif kind in (Kind.COMPUTE, Kind.CUSTOM) and not _is_tiny([args, kwargs, out]):
            self.seen[str(func)] = "island"
        return out


def _is_tiny(tree: Any) -> bool:
    """Whether an op ran natively only because there is next to nothing to compute."""
    return all(t.numel() <= TINY for t in leaves(tree) if isinstance(t, torch.Tensor))


def _own(tree: Any) -> Any:
    """Arguments that a run may write without a trace in the next run."""
    try:
        return copy.deepcopy(tree)
    except (RuntimeError, TypeError):  # a tensor with a history, a generator
        return tree


def _spread(found: list[Any], most: int) -> list[Any]:
    """At most so many of the samples, evenly spread: the first ones are often empty tensors."""
    if len(found) <= most:
        return found
    return [found[i * (len(found) - 1) // max(1, most - 1)] for i in range(most)]


def entry_name(info: Any) -> str:
    """The name of an entry of op_db, with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def measure(info: Any, dtype: torch.dtype = torch.float32, samples: int = 16, compiles: bool = False) -> Row:
    """Run samples of an OpInfo forward under the runtime, and say how they ran.

    Args:
        info: an OpInfo of op_db.
        dtype: of its samples.
        samples: how many at most.
        compiles: have XLA compile their regions, which takes most of the time; else they are only lowered.
    """
    if dtype not in info.supported_dtypes("cpu"):
        return Row(entry_name(info), "none", f"it takes no {str(dtype).removeprefix('torch.')}")
    whys: dict[str, dict[str, str]] = {how: {} for how in HOW}
    reasons: dict[str, str] = {}
    deferred = count = 0

    def take(event: Event) -> None:
        if event.kind == "island":
            reasons[event.data["op"]] = event.data["reason"]

    LOG.sinks.append(take)
    with ExitStack() as around:
        around.callback(LOG.sinks.remove, take)
        if not compiles:
            around.enter_context(lowered_only())
        ISLANDS.clear()  # who told of them was another entry
        torch.manual_seed(0)
        for sample in _spread(list(info.sample_inputs("cpu", dtype)), samples):
            count += 1
            # The first run of a doubtful call is ATen's, to learn what it returns; what counts is how it goes on.
            _run(info, sample, None)
            before = Counter(LOG.counts)
            ops_before = LOG.totals["flush ops"]
            beneath = _Beneath()
            _run(info, sample, beneath)
            islands = _islands(LOG.counts - before)
            deferred += int(LOG.totals["flush ops"] - ops_before)
            for op in islands:
                whys["island"][op] = reasons.get(op, "")
            for op, how in beneath.seen.items():
                whys[how][op] = reasons.get(op, "")
    if not count:
        return Row(entry_name(info), "none", "it has no samples on a CPU")
    for how in ("island", "values", "random"):
        if whys[how]:
            return Row(entry_name(info), how, _told(whys[how]))
    return Row(entry_name(info), "xla" if deferred else "view", "")


def _islands(counts: Counter[str]) -> list[str]:
    """The ops that ran as islands, from the counters of the event log."""
    return [k.removeprefix("island ") for k in counts if k.startswith("island ") and not k.startswith("island for ")]


def _told(whys: Mapping[str, str]) -> str:
    return "; ".join(f"{op}: {why}" if why else op for op, why in sorted(whys.items()))


def _run(info: Any, sample: Any, beneath: _Beneath | None) -> None:
    first, args, kwargs = _own([sample.input, sample.args, sample.kwargs])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Mode strict: the same lowerings as fused, one op per region. Whether compiling pays is not asked.
        context = fused_eager(mode="strict", native="never", progress=False, cache="off")
        try:
            with beneath or nullcontext(), context:
                info.op(first, *args, **kwargs)
        except Exception as error:  # whatever eager raises for a sample that it does not take (CUDA's alone, say)
            if beneath is not None:
                beneath.seen[entry_name(info)] = "island"
            LOG.emit("island", op=entry_name(info), reason=f"raises: {str(error).partition(chr(10))[0]}", site="")


def corpus() -> list[Any] | None:
    """torch's op_db; None where it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_methods_invocations import op_db
    except ImportError:
        return None
    return list(op_db)


def rows(
    names: Iterable[str] = (), dtype: torch.dtype = torch.float32, samples: int = 16, compiles: bool = False
) -> Iterator[Row]:
    """The measured rows of the named entries of op_db (none named: of all), in its order."""
    wanted = set(names)
    for info in corpus() or []:
        if not wanted or info.name in wanted or entry_name(info) in wanted:
            yield measure(info, dtype, samples, compiles)


def registered() -> list[Row]:
    """Without op_db: the overloads that have a row in the fusion rules."""
    from fused_eager.fusion_rules import RULES

    return [Row(name, "xla", rule.note) for name, rule in sorted(RULES.items())]


def counts(table: Iterable[Row]) -> Counter[str]:
    """How many entries ran how."""
    return Counter(row.how for row in table)


def summary(table: list[Row]) -> str:
    """The counts in a sentence."""
    n = counts(table)
    measured = len(table) - n["none"]
    lowered = sum(n[how] for how in LOWERED)
    parts = ", ".join(f"{n[how]} {how}" for how in HOW if n[how])
    return f"{lowered} of {measured} entries run without ATen ({parts})."


def as_markdown(table: list[Row], dtype: torch.dtype) -> str:
    """docs/ops.md."""
    name = str(dtype).removeprefix("torch.")
    lines = [
        "# Which ops run through XLA",
        "",
        "Generated by `python -m fused_eager ops --write docs/ops.md`: the samples of torch's op corpus (op_db),",
        f"{name}, forward, were run under the runtime on a CPU, and this is how they ran. Regions were lowered, and",
        "not compiled. Ops that are not lowered run through ATen and agree all the same.",
        "",
        summary(table),
        "",
        "| how | entries | meaning |",
        "|---|---|---|",
    ]
    n = counts(table)
    lines += [f"| {how} | {n[how]} | {meaning} |" for how, meaning in HOW.items()]
    for how in ("island", "values", "random", "none"):
        chosen = [row for row in table if row.how == how]
        if chosen:
            lines += ["", f"## {how}", "", "| entry | why |", "|---|---|"]
            lines += [f"| {row.op} | {_cell(row.why)} |" for row in chosen]
    for how in LOWERED:
        lines += ["", f"## {how}", "", ", ".join(f"`{row.op}`" for row in table if row.how == how)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_text(table: list[Row]) -> str:
    """The table for a terminal."""
    width = max((len(row.op) for row in table), default=0)
    lines = [f"{row.op:<{width}}  {row.how:<7}{row.why}".rstrip() for row in table]
    return "\n".join([*lines, "", summary(table)])


def main(argv: list[str], prog: str) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="Say which ops run through XLA, and why others do not.")
    parser.add_argument("names", nargs="*", help="entries of torch's op_db; none: all")
    parser.add_argument("--samples", type=int, default=16, help="samples per entry (default: 16)")
    parser.add_argument("--compile", action="store_true", help="compile as well; takes four times as long")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", metavar="FILE", help="write the table as Markdown to a file")
    args = parser.parse_args(argv)
    measured = corpus() is not None
    table: list[Row] = []
    with waiting(lambda: f"{len(table)} entries measured"):
        found = rows(args.names, samples=args.samples, compiles=args.compile) if measured else registered()
        for row in found:
            table.append(row)
    if measured and not table:
        print(f"{prog}: op_db has no entry {', '.join(args.names)}", file=sys.stderr)
        return 2
    if not measured:
        print(f"{prog}: op_db cannot be imported (it needs expecttest); these are the rules' rows", file=sys.stderr)
    if args.write:
        with open(args.write, "w", encoding="utf-8") as file:
            file.write(as_markdown(table, torch.float32))
        print(summary(table))
    elif args.json:
        print(json.dumps({"counts": counts(table), "rows": [asdict(row) for row in table]}, indent=1))
    else:
        print(as_text(table))
    return 0
