"""What more of everything costs: `python -m benchmarks.scale [AXIS...]`.

Each axis (ops in a stream, live tensors, distinct regions, entries of the cache, threads, ops of a run) is measured at
some sizes, each in a process of its own with an empty cache. What is told is the cost of one unit at each size, over
the cost at the smallest: 1 is perfect, and more than 1.2 too much. Times are of units that repeat; what compiling costs
is not in them. `--plot FILE` draws cost against size.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FEW = 3  # rounds of which the fastest counts: what else the machine does makes them slower, and none faster


def _fastest(round_: Callable[[], object], rounds: int = FEW) -> float:
    """Seconds."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        round_()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _resident() -> float:
    """Mebibytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _stream(size: int) -> float:
    """Seconds for an op of a stream of `size` ops that nothing reads before its end."""
    import torch

    from fused_eager import fused_eager

    def chain() -> float:
        x = torch.ones(8)
        for _ in range(size // 2):
            x = x * 1.0001 + 0.5
        return float(x.sum())

    with fused_eager(compile="wait", native="never"):
        for _ in range(3):
            chain()
        return _fastest(chain) / size


def _tensors(size: int) -> float:
    """Seconds for each of `size` live tensors in a step that updates all of them."""
    import torch

    from fused_eager import fused_eager

    values = [torch.ones(8) for _ in range(size)]

    def step() -> None:
        torch._foreach_mul_(values, 1.0001)
        torch._foreach_add_(values, 0.5)
        float(values[-1].sum())

    with fused_eager(compile="wait", native="never"):
        for _ in range(3):
            step()
        return _fastest(step) / size


def _regions(size: int) -> float:
    """Seconds for a stream of three ops, one of `size` that are regions of their own, after all have been compiled."""
    import torch

    from fused_eager import fused_eager

    # Each on a line of its own: shapes that keep changing on one line would be left to ATen.
    lines = ["def visit(inputs):", *[f"    float((inputs[{n}] * 2 + 1).sum())" for n in range(size)]]
    names: dict[str, Callable[[list[torch.Tensor]], None]] = {}
    exec(compile("\n".join(lines), "lines", "exec"), names)
    inputs = [torch.ones(1 + n // 40, 2 + n % 40) for n in range(size)]

    def visit() -> None:
        names["visit"](inputs)

    with fused_eager(compile="wait", native="never"):
        for _ in range(2):
            visit()
        return _fastest(visit) / size


def _entries(size: int) -> float:
    """Seconds until the first result of a process that finds it in a cache of `size` entries."""
    folder = Path(os.environ["FUSED_EAGER_CACHE_DIR"])
    program = "import torch, fused_eager as f\nwith f.fused_eager(compile='wait', native='never'):\n"
    program += "    print(float((torch.ones(8) * 2 + 1).sum()))\n"

    def start() -> None:
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)

    start()
    for kind in ("ac", "cas"):
        content = next((folder / kind).iterdir()).read_bytes()
        for n in range(size):
            (folder / kind / hashlib.sha256(str(n).encode()).hexdigest()).write_bytes(content)
    return _fastest(start)


def _threads(size: int) -> float:
    """Seconds for an op, of `size` threads with a stream each that run at the same time."""
    import torch

    from fused_eager import fused_eager

    steps = 512 // size

    def work() -> None:
        x = torch.ones(64)
        with fused_eager(compile="wait", native="never"):
            for _ in range(steps):
                y = x
                for _ in range(20):
                    y = y * 1.5 + 1
                float(y.sum())

    def together() -> None:
        threads = [threading.Thread(target=work) for _ in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together()
    return _fastest(together) / (steps * size * 41)


def _run(size: int) -> float:
    """Mebibytes by which a loop has grown after `size` ops, above what it had after 40,000."""
    import torch

    from fused_eager import fused_eager

    x = torch.ones(64)
    with fused_eager(compile="wait", native="never"):
        began = 0.0
        for n in range(size // 40):
            y = x
            for _ in range(20):
                y = y * 1.5 + 1
            if n % 8 == 0:
                float(y.sum())
            if n == 1_000:
                gc.collect()
                began = _resident()
        gc.collect()
        return _resident() - began


@dataclass(frozen=True)
class Axis:
    """What grows, what is measured of it, and where."""

    about: str
    unit: str
    times: float  # from what `measure` returns to the unit
    measure: Callable[[int], float]
    sizes: tuple[int, ...]


AXES = {
    "stream": Axis("ops in one stream", "us an op", 1e6, _stream, (100, 1_000, 10_000, 100_000)),
    "tensors": Axis("live tensors", "us a tensor", 1e6, _tensors, (100, 1_000, 10_000)),
    "regions": Axis("distinct regions", "us a stream", 1e6, _regions, (20, 200, 2_000)),
    "entries": Axis("entries of the cache", "s to the first result", 1.0, _entries, (1, 1_000, 100_000)),
    "threads": Axis("threads with a stream each", "us an op", 1e6, _threads, (1, 8, 64)),
    "run": Axis("ops of a run", "MiB it has grown", 1.0, _run, (100_000, 1_000_000, 10_000_000)),
}


def measured(name: str, size: int) -> float:
    """In a process of its own, with an empty cache. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
        environment |= {"FUSED_EAGER_CACHE_DIR": folder, "FUSED_EAGER_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", "--one", name, str(size)],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} at {size}: {done.stderr.strip()[-500:]}")
    return float(done.stdout.split()[-1])


def draw(found: dict[str, dict[int, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(2, 3, figsize=(12, 6), squeeze=False)
    for pane, (name, values) in zip(panes.flat, found.items(), strict=False):
        pane.plot(list(values), list(values.values()), marker="o")
        pane.set(xscale="log", ylim=(0, None), xlabel=AXES[name].about, ylabel=AXES[name].unit)
    figure.tight_layout()
    figure.savefig(file)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="What more of everything costs.")
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=f"default: all of {', '.join(AXES)}")
    parser.add_argument("--most", type=float, default=float("inf"), help="leave out sizes above this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--one", nargs=2, metavar=("AXIS", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(AXES[args.one[0]].measure(int(args.one[1])))
        return 0
    unknown = [name for name in args.axes if name not in AXES]
    if unknown:
        parser.error(f"there is no axis {unknown[0]!r}; there are {', '.join(AXES)}")
    found: dict[str, dict[int, float]] = {}
    print("| what grows | " + " | ".join(["size: cost"] * 4) + " |\n|---|---|---|---|---|")
    for name in args.axes or AXES:
        axis = AXES[name]
        values = found.setdefault(name, {})
        for size in (size for size in axis.sizes if size <= args.most):
            print(f"... {name} at {size:,}", file=sys.stderr, flush=True)
            values[size] = axis.times * measured(name, size)
        cells = [f"{size:,}: {value:.3g}" for size, value in values.items()]
        print(f"| {axis.about}, {axis.unit} | " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if args.plot:
        draw(found, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
