"""Runs models under `torch.compile` in several ways, and writes the table of what came of it.

    python -m tests.clients.compiled --write docs/compiler.md
    python -m tests.clients.compiled --ways default,again,strict llama gpt2

Each way is a process of its own (`tests.clients.compiled_models`). What it computes is compared with plain PyTorch.
Where Dynamo breaks a program into graphs is compared with its own backend `eager`: what is one graph there has to be
one here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .running import ROOT, SETTINGS, beside, differences

Results = dict[str, dict[str, Any]]
SUITES = ("transformers", "timm", "workloads")
TOLERANCE = 1e-3  # of losses and outputs, against plain PyTorch
NORMS = 1e-2  # of gradients' norms: ghostnet's third moves by 6e-3 in plain PyTorch if its weights do by 2e-7
BEGIN, END = "<!-- models -->", "<!-- models end -->"


@dataclass(frozen=True)
class Way:
    """How programs are compiled: arguments of `tests.clients.compiled_models`, and what is to hold beyond values."""

    arguments: tuple[str, ...] = ("--backend", "fused_eager")
    sizes: str = "2,2,2"
    warm: bool = False  # the cache is full: nothing is compiled


def _options(options: str) -> Way:
    return Way(("--backend", "fused_eager", "--options", options))


WAYS = {
    "default": Way(),
    "again": Way(warm=True),
    "strict": _options('{"mode": "strict"}'),
    "debug": _options('{"mode": "debug"}'),
    "off": _options('{"mode": "off"}'),
    "max-autotune": Way(("--backend", "fused_eager", "--mode", "max-autotune")),
    "dynamic": Way(("--backend", "fused_eager", "--dynamic"), "4,6,5"),
    "tpu": Way(("--backend", "tpu", "--device", "tpu")),
}


def run(folder: Path, arguments: tuple[str, ...], sizes: str, timeout: float = 3600) -> Results:
    """Run programs in a process of their own. What it keeps goes to `folder`, the compile cache as well."""
    out = folder / "results.pt"
    out.unlink(missing_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FUSED_EAGER_", "TESTS_ON"))}
    environment.update(SETTINGS, FUSED_EAGER_CACHE_DIR=str(folder / "cache"))
    del environment["FUSED_EAGER_VALIDATE"]
    folders = [str(beside("torchvision"))] if "timm" in ",".join(arguments) else []  # it breaks transformers alone
    paths = [*folders, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "tests.clients.compiled_models", "--out", str(out), "--sizes", sizes]
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=timeout)  # fmt: skip
    if done.returncode or not out.exists():
        raise RuntimeError(f"the process ended with {done.returncode}: {done.stdout[-3000:]}")
    return torch.load(out, weights_only=False)


def expected(folder: Path, sizes: str, which: tuple[str, ...]) -> Results:
    """What programs compute in plain PyTorch, and where Dynamo breaks them into graphs. `which` says which programs, as
    arguments of `tests.clients.compiled_models`."""
    plain = run(folder, which, sizes)
    dynamo = run(folder, ("--backend", "eager", *which), sizes)
    return {name: {**plain[name], "breaks": dynamo[name]["breaks"]} for name in plain}


def found(folder: Path, way: Way, which: tuple[str, ...], wanted: Results) -> Results:
    """What they compute in a way. What is one graph to Dynamo is compiled with `fullgraph`."""
    whole = ",".join(name for name, its in wanted.items() if not its["breaks"])
    return run(folder, (*way.arguments, "--fullgraph", whole, *which), way.sizes)


def faults(way: Way, wanted: dict[str, Any], its: dict[str, Any]) -> list[str]:
    """What is not as it is to be, in words."""
    if "error" in its:
        return [its["error"].splitlines()[0]]
    said = []
    for kept, tolerance in ((("losses", "outputs"), TOLERANCE), (("norms",), NORMS)):
        pair = [{k: v for k, v in each.items() if k in kept} for each in (wanted, its)]
        said += differences(*pair, tolerance)
    if its["breaks"] > wanted["breaks"]:
        said.append(f"{its['breaks']} graph breaks, not {wanted['breaks']}")
    if way.warm and its["events"].get("compile"):
        said.append(f"{its['events']['compile']} regions were compiled again")
    return said


def apart(wanted: dict[str, Any], its: dict[str, Any]) -> float:
    """The largest difference, of the largest number."""
    pairs = [(torch.tensor(wanted["losses"]), torch.tensor(its["losses"]))]
    outputs = [each.get("outputs", []) for each in (wanted, its)]
    pairs += zip(*(o if isinstance(o, list) else [o] for o in outputs), strict=True)
    return max([((a - b).abs().max() / a.abs().max()).item() for a, b in pairs if a.numel()], default=0.0)


def table(wanted: dict[str, Results], ways: dict[str, Results]) -> str:
    """The table: a row for each program."""
    rows = ["| model | result | largest difference | graph breaks (Dynamo's own) | run by ATen |",
            "|---|---|---|---|---|"]  # fmt: skip
    for name, its in ways["default"].items():
        said = []
        for how, got in ways.items():
            said += [f"{how}: {each}" for each in faults(WAYS[how], wanted[WAYS[how].sizes][name], got[name])]
        if "error" in its:
            rows.append(f"| {name} | fails | | | {its['error'].splitlines()[0][:80]} |")
            continue
        islands = ", ".join(f"`{op.removesuffix('.default')}`" for op in its["islands"])
        plain = wanted["2,2,2"][name]
        result, breaks = said[0][:90] if said else "equal", f"{its['breaks']} ({plain['breaks']})"
        rows.append(f"| {name} | {result} | {apart(plain, its):.0e} | {breaks} | {islands} |")
    return "\n".join(rows) + "\n"


def write(page: Path, text: str) -> None:
    """Put the table where the page has it."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    """Run them. Returns 1 if one fails or differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.compiled", description=__doc__)
    parser.add_argument("--write", metavar="FILE", help="write the table into this page")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("names", nargs="*", help="programs; by default all")
    args = parser.parse_args()
    ways: dict[str, Results] = {}
    wanted: dict[str, Results] = {}
    failed = False
    which = ("--suites", args.suites, *args.names)
    with TemporaryDirectory() as folder:
        for name in args.ways.split(","):
            way = WAYS[name]
            if way.sizes not in wanted:
                wanted[way.sizes] = expected(Path(folder), way.sizes, which)
            ways[name] = found(Path(folder), way, which, wanted[way.sizes])
            for program, its in ways[name].items():
                said = faults(way, wanted[way.sizes][program], its)
                failed |= bool(said)
                print(f"{name}: {program}: {'; '.join(said) or 'equal'}", file=sys.stderr, flush=True)
    if args.write:
        write(Path(args.write), table(wanted, ways))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
