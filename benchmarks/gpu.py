"""`python -m benchmarks.gpu [WORKLOAD...]`: the device on a GPU, beside what PyTorch itself does there.

Plain PyTorch on `cuda` is the reference, `torch.compile` its own compiler; the device's modes go through JAX to the same
GPU, in the same process, in turns. On a machine without a GPU (`--beside cpu`) the same lines run on CPU tensors and the
device that the CPU stands in for: that shows that they run, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks import table
from benchmarks.measure import Effort, measure
from benchmarks.model_programs import lstm_train
from benchmarks.systems import System
from benchmarks.workloads import ROWS, WORKLOADS, Size, Workload, gpt, select

DEVICE = "tpu"
_NAMES = (
    *("elementwise_16m", "layernorm_gelu_residual", "mlp_adam_foreach", "gpt_adamw"),
    *("resnet18_train_64", "resnet18_train_128"),
)
# cuDNN and XLA round the factors of a convolution to tf32, each in its own kernels.
_LOOSE = {"rtol": 3e-2, "atol": 3e-2}
GPU_ROWS = (
    *(replace(WORKLOADS[name], **(_LOOSE if name.startswith("resnet") else {})) for name in _NAMES),
    Workload(
        "lstm",
        "two-layer LSTM of 256 on 16 x 32 tokens, SGD",
        lstm_train,
        {"vocab": 500, "dim": 128, "seq": 32, "batch": 16},
        {"vocab": 7, "dim": 4, "seq": 3, "batch": 2},
        trains=True,
    ),
    Workload(
        "gpt_large",
        "8 layers, d 1024, seq 512, batch 16, dropout, clipping, AdamW",
        gpt,
        {"layers": 8, "dim": 1024, "seq": 512, "batch": 16},
        dict(next(row for row in ROWS if row.name == "gpt_adamw").tiny),
        trains=True,
        draws=True,
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


def _fetch(tensor: Tensor) -> Tensor:
    return tensor.cpu()


def _compilations() -> int:
    from fused_eager import report

    return int(report().compilations)


def systems(beside: str) -> dict[str, System]:
    """What is compared, by name: plain PyTorch and its compiler on `beside` ("cuda" or "cpu"), and the device."""
    wait = torch.cuda.synchronize if beside == "cuda" else lambda: None
    plain = System("eager", f"plain PyTorch on {beside}", nullcontext, wait, wait, place=_placed(beside), fetch=_fetch)
    own = replace(plain, name="inductor", about=f"torch.compile on {beside}", wrap=torch.compile, same_random=False)
    tpu = getattr(torch, DEVICE)

    def mode(name: str, mode: Any) -> System:
        return System(
            name,
            f"the device, {name}",
            lambda: tpu.set_eager_mode(mode),
            tpu.synchronize,
            tpu.synchronize,
            place=_placed(DEVICE),
            fetch=_fetch,
            compilations=_compilations,
            same_random=False,
        )

    modes = tpu.EagerMode
    return {s.name: s for s in (plain, own, mode("fused", modes.DEFER_AND_FUSE), mode("strict", modes.DEFER_NEVER))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help="names or beginnings of names; default: all")
    parser.add_argument("--systems", default="inductor,fused,strict", help="beside plain PyTorch, with commas")
    parser.add_argument("--beside", choices=("cuda", "cpu"), default="cuda", help="where plain PyTorch runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=float, default=0.2, metavar="SECONDS")
    parser.add_argument("--tiny", action="store_true", help="sizes of the tests: shows that it runs, measures nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    given = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CUDA's own tensors need room beside ours
    import fused_eager.tpu  # noqa: F401 - registers the device

    known = systems(given.beside)
    try:
        chosen, rows = [known[name] for name in given.systems.split(",")], select(given.names, GPU_ROWS)
    except (KeyError, ValueError) as error:
        raise SystemExit(f"{error}: known are {', '.join(known)}") from None
    size: Size = "tiny" if given.tiny else "full"
    effort = Effort(given.rounds, given.block, settle_s=20.0)
    gpu = torch.cuda.get_device_name() if given.beside == "cuda" else "none"
    settings = {"gpu": gpu, "torch": torch.__version__, **asdict(effort)}
    print("\n".join(f"{name}: {value}" for name, value in settings.items()), flush=True)
    found = []
    for workload in rows:
        print(f"... {workload.name}", file=sys.stderr, flush=True)
        timings = measure(workload, chosen, effort, size, known["eager"])
        found.append(table.Row(workload.name, workload.about, workload.trains, timings))
        print({name: (t.failure or f"{t.seconds * 1e3:.3f} ms, {t.ratio:.3f}") for name, t in timings.items()}, flush=True)
        if given.json:
            given.json.write_text(table.to_json(found, settings))
    names = ["eager", *(system.name for system in chosen)]
    print(f"\n{table.render(found, names)}\n\n{table.summary(found, names)}")
    return 1 if any(t.failure for row in found for t in row.timings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
