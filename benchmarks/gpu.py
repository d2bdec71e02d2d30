"""`python -m benchmarks.gpu [WORKLOAD...]`: the device on a GPU, beside what PyTorch itself does there.

Plain PyTorch on `cuda` is the reference, `torch.compile` its own compiler; the device's modes go through JAX to the
same GPU. Torch has one accelerator in a process, so each side has a process of its own, and the times are absolute
ones: the GPU does nothing else. On a machine without a GPU (`--beside cpu`) the same lines run on CPU tensors and the
device that the CPU stands in for: that shows that they run, and measures nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks import table
from benchmarks.measure import Effort, Timing, compare, first_results, timed
from benchmarks.peers import fetched
from benchmarks.programs import PROGRAMS
from benchmarks.systems import System, no_wait, regions_compiled
from benchmarks.workloads import WORKLOADS, Workload, select

DEVICE = "tpu"
SYSTEMS = ("eager", "inductor", "fused", "strict")
_NAMES = (
    *("elementwise_16m", "layernorm_gelu_residual", "mlp_adam_foreach", "gpt_adamw"),
    *("resnet18_train_64", "resnet18_train_128"),
)
# cuDNN and XLA round the factors of a convolution to tf32, each in its own kernels.
_LOOSE = {"rtol": 3e-2, "atol": 3e-2}
GPU_ROWS = (
    *(replace(WORKLOADS[name], **(_LOOSE if name.startswith("resnet") else {})) for name in _NAMES),
    *(replace(row, name="lstm", rtol=Workload.rtol, atol=Workload.atol) for row in select(["lstm_train"], PROGRAMS)),
    replace(
        WORKLOADS["gpt_adamw"],
        name="gpt_large",
        about="8 layers, d 1024, seq 512, batch 16, dropout, clipping, AdamW",
        full={"layers": 8, "dim": 1024, "seq": 512, "batch": 16},
    ),
)


class Placed(TorchFunctionMode):
    """In its body a workload is set up on a device, with the numbers that the CPU draws: they are the same anywhere."""

    DRAWN = frozenset({torch.randn, torch.rand, torch.randint})

    def __init__(self, device: str):
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.DRAWN:
            with torch.device("cpu"):
                return func(*args, **kwargs).to(self.device)
        if getattr(func, "__module__", "") == "torch.nn.init":
            target = kwargs.pop("tensor") if "tensor" in kwargs else args[0]
            with torch.device("cpu"), torch.no_grad():
                drawn = func(torch.empty(target.shape, dtype=target.dtype), *args[1:], **kwargs)
                return target.copy_(drawn)
        return func(*args, **kwargs)


def _placed(device: str) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def place() -> Iterator[None]:
        with torch.device(device), Placed(device):
            yield

    return place


def plain(beside: str) -> list[System]:
    """PyTorch itself on "cuda" or "cpu", and its compiler."""
    wait = torch.cuda.synchronize if beside == "cuda" else no_wait
    eager = System("eager", f"plain PyTorch on {beside}", nullcontext, wait, wait, place=_placed(beside), fetch=fetched)
    return [eager, replace(eager, name="inductor", about=f"torch.compile on {beside}", wrap=torch.compile)]


def device() -> list[System]:
    """The device's modes."""
    import fused_eager.tpu  # noqa: F401 - registers the device

    tpu = getattr(torch, DEVICE)

    def mode(name: str, mode: Any) -> System:
        return System(
            name,
            f"the device, {name}",
            lambda: tpu.set_eager_mode(mode),
            tpu.synchronize,
            tpu.synchronize,
            place=_placed(DEVICE),
            fetch=fetched,
            compilations=regions_compiled,
        )

    return [mode("fused", tpu.EagerMode.DEFER_AND_FUSE), mode("strict", tpu.EagerMode.DEFER_NEVER)]


def work(given: argparse.Namespace, folder: Path) -> None:
    """Measure one side. For each workload and system a file with the first results, and a line with the times."""
    chosen = [s for s in (device() if given.side == "device" else plain(given.beside)) if s.name in given.systems]
    effort = Effort(given.rounds, given.block, settle_s=20.0)
    for workload in select(given.names, GPU_ROWS):
        print(f"... {workload.name}", file=sys.stderr, flush=True)
        for system in chosen:
            try:
                runner, results = first_results(workload, system, "tiny" if given.tiny else "full")
                torch.save(results, folder / f"{workload.name}.{system.name}.pt")
                times = timed(runner, effort)
            except Exception as error:  # a line of the table, and not the end of the others
                times = Timing(failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            torch._dynamo.reset()
            print(json.dumps([workload.name, system.name, asdict(times)]), flush=True)


def measured(given: argparse.Namespace, folder: Path, side: str) -> dict[tuple[str, str], Timing]:
    """What a process of one side has measured, by workload and system."""
    command = [sys.executable, "-m", "benchmarks.gpu", *given.names, "--side", side, "--folder", str(folder)]
    command += ["--systems", ",".join(given.systems), "--beside", given.beside, "--rounds", str(given.rounds)]
    command += ["--block", str(given.block), *(["--tiny"] if given.tiny else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode:
        raise SystemExit(f"the side {side!r} ended with {done.returncode}")
    return {(workload, system): Timing(**timing) for workload, system, timing in found}


def related(workload: Workload, name: str, timing: Timing, plain: Timing, folder: Path) -> Timing:
    """A timing with its ratio to plain PyTorch's, or with a failure where its first results are others."""
    if timing.failure or plain.failure:
        return timing
    ours, expected = (torch.load(folder / f"{workload.name}.{of}.pt") for of in (name, "eager"))
    other = System(name, "", nullcontext, same_random=name == "eager")
    difference, equal = compare(workload, other, ours, expected)
    if not equal:
        return Timing(failure=f"wrong results: off by {difference:.2g}", difference=difference)
    return replace(timing, ratio=timing.seconds / plain.seconds, ratio_spread=0.0, difference=difference)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help="names or beginnings of names; default: all")
    names = functools.partial(str.split, sep=",")
    parser.add_argument("--systems", type=names, default=list(SYSTEMS), help="with commas; default: %(default)s")
    parser.add_argument("--beside", choices=("cuda", "cpu"), default="cuda", help="where plain PyTorch runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=float, default=0.2, metavar="SECONDS")
    parser.add_argument("--tiny", action="store_true", help="sizes of the tests: shows that it runs, measures nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--side", choices=("plain", "device"), help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if unknown := [name for name in given.systems if name not in SYSTEMS]:
        parser.error(f"no system is called {unknown[0]!r}; known: {', '.join(SYSTEMS)}")
    if given.side:
        work(given, given.folder)
        return 0
    try:
        workloads = select(given.names, GPU_ROWS)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        found = {**measured(given, Path(folder), "plain"), **measured(given, Path(folder), "device")}
        rows = []
        for workload in workloads:
            base = found[workload.name, "eager"]
            timings = {
                name: related(workload, name, found[workload.name, name], base, Path(folder)) for name in given.systems
            }
            rows.append(table.Row(workload.name, workload.about, workload.trains, timings))
    print(f"{table.render(rows, given.systems)}\n\n{table.summary(rows, given.systems)}")
    if given.json:
        given.json.write_text(table.to_json(rows, {"torch": torch.__version__, "beside": given.beside}))
    return 1 if any(t.failure for row in rows for t in row.timings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
