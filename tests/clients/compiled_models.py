"""Models under `torch.compile`: trains and evaluates them with one backend, and keeps what came of it.

    python -m tests.clients.compiled_models --out results.pt --backend fused_eager --options '{"mode": "strict"}' llama

Without `--backend` nothing is compiled. A process has one backend, and so one compile cache: a second one with the same
`FUSED_EAGER_CACHE_DIR` says what is loaded.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import WORKLOADS

Tensor = torch.Tensor
Batch = dict[str, Any]
Wrap = Callable[[Any], Any]
SEQUENCES = {"input_ids", "labels", "pixel_values", "input_features", "images"}  # first axis: the batch
# With a larger `eps`, Adam's steps are not as large for gradients of rounding errors as for others.
ADAM = functools.partial(torch.optim.AdamW, eps=1e-4)
STEPS: tuple[Any, ...] = (ADAM, ADAM, torch.optim.SGD)


@dataclass(frozen=True)
class Case:
    """A program: what it is called, of which suite it is, and what it computes with what it compiles by `wrap`."""

    name: str
    suite: str
    compute: Callable[[Wrap, list[int], str], dict[str, Any]]


def _trained(
    build: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    loss: Callable[[Any, Batch], Tensor],
    outputs: Callable[[Any], Tensor],
    wrap: Wrap,
    sizes: list[int],
    device: str,
) -> dict[str, Any]:
    """Losses of a step of each kind with dropout, gradients' size, and what the model says in the end."""
    model = build().to(device)
    call = wrap(model)
    found: dict[str, Any] = {"losses": [], "norms": []}
    whole = {k: torch.cat([v] * 4) for k, v in batch().items()}
    torch.manual_seed(1)
    for step, size in enumerate(sizes):
        given = {k: v[:size].to(device) for k, v in whole.items()}
        optimizer = STEPS[step % len(STEPS)](model.parameters(), lr=1e-3)
        value = loss(call(**given), given)
        value.backward()
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(value.item())
        found.setdefault("first step", time.perf_counter())
    model.eval()
    with torch.no_grad():
        found["outputs"] = outputs(call(**{k: v[: sizes[0]].to(device) for k, v in whole.items()})).cpu()
    return found


def _transformers() -> Iterator[Case]:
    from tests.models.test_transformers import FAMILIES, build

    for name, family in FAMILIES.items():

        def compute(wrap: Wrap, sizes: list[int], device: str, family: Any = family) -> dict[str, Any]:
            made = lambda: build(family).train()  # noqa: E731
            loss, outputs = (lambda out, given: out.loss), (lambda out: out.logits)
            return _trained(made, family.inputs, loss, outputs, wrap, sizes, device)

        yield Case(name, "transformers", compute)


def _timm() -> Iterator[Case]:
    families = importlib.import_module("tests.clients.examples.timm_families")
    for name, options in families.FAMILIES.items():
        size = options.get("img_size", 64)

        def batch(size: int = size) -> Batch:
            drawn = torch.Generator().manual_seed(2)
            return {"x": torch.randn(2, 3, size, size, generator=drawn)}

        def compute(
            wrap: Wrap, sizes: list[int], device: str, name: str = name, options: Any = options, batch: Any = batch
        ) -> dict[str, Any]:
            def made() -> nn.Module:
                torch.manual_seed(0)
                return families.timm.create_model(name, num_classes=7, **options)

            def loss(out: Tensor, given: Batch) -> Tensor:
                return F.cross_entropy(out, torch.arange(len(out), device=out.device) % 7)

            return _trained(made, batch, loss, lambda out: out, wrap, sizes, device)

        yield Case(name, "timm", compute)


def _workloads(size: Any) -> Iterator[Case]:
    for name, row in WORKLOADS.items():

        def compute(wrap: Wrap, sizes: list[int], device: str, row: Any = row) -> dict[str, Any]:
            with torch.device(device):
                step = row.build(wrap, size)
                torch.manual_seed(1)
                found: dict[str, Any] = {"losses": []}
                for _ in sizes:
                    out = step()
                    if row.trains:
                        found["losses"].append(out)
                    else:
                        found["outputs"] = [t.cpu() for t in (out if isinstance(out, list) else [out])]
                    found.setdefault("first step", time.perf_counter())
            return found

        yield Case(name, "workloads", compute)


def cases(suites: list[str], size: str = "tiny") -> dict[str, Case]:
    """The programs of some suites."""
    made = {"transformers": _transformers, "timm": _timm, "workloads": lambda: _workloads(size)}
    return {case.name: case for suite in suites for case in made[suite]()}


def outcome(case: Case, backend: str, sizes: list[int], device: str, **how: Any) -> dict[str, Any]:
    """What a program computes, how many graphs Dynamo made of it and where it broke them, and what had to be compiled;
    `error` where it raised."""
    from torch._dynamo.utils import counters

    from fused_eager.log.events import LOG, Event

    torch._dynamo.reset()
    counters.clear()
    events: list[Event] = []
    LOG.sinks.append(events.append)
    began = time.perf_counter()
    try:
        found = case.compute(lambda f: torch.compile(f, backend=backend, **how) if backend else f, sizes, device)
        found["first step"] -= began
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:400]}"}
    finally:
        LOG.sinks.remove(events.append)
    found["seconds"] = time.perf_counter() - began
    found["breaks"] = sum(counters["graph_break"].values())
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["events"] = dict(Counter(e.kind for e in events if e.kind in ("compile", "cache-load", "graph")))
    found["islands"] = sorted({str(e.data["op"]) for e in events if e.kind == "island"})
    found["unfit"] = sorted({e.data["unfit"] for e in events if e.kind == "graph" and e.data["unfit"]})
    return found


def main() -> None:
    """Run programs, and keep what they computed in a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.compiled_models", description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backend", default="")
    parser.add_argument("--options", type=json.loads, default=None)
    parser.add_argument("--mode")
    parser.add_argument("--dynamic", action="store_true", default=None)
    parser.add_argument("--fullgraph", default="", help="names of programs to be one graph, with commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", default="2,2,2")
    parser.add_argument("--suites", default="transformers,timm,workloads")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every Nth program, beginning with K")
    parser.add_argument("--size", default="tiny", help="of workloads: tiny or full")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.device != "cpu":
        import fused_eager.tpu  # noqa: F401
    sizes, whole = list(map(int, args.sizes.split(","))), set(args.fullgraph.split(","))
    found = {}
    known = cases(args.suites.split(","), args.size)
    first, step = map(int, args.part.split("/"))
    for name, case in list(known.items())[first::step]:
        if args.names and name not in args.names:
            continue
        how = {k: v for k, v in (("options", args.options), ("mode", args.mode), ("dynamic", args.dynamic)) if v}
        found[name] = outcome(case, args.backend, sizes, args.device, fullgraph=name in whole, **how)
        said = {k: v for k, v in found[name].items() if k not in ("outputs",)}
        print(name, said, flush=True)
        torch.save(found, args.out)


if __name__ == "__main__":
    main()
