"""A training step on several ranks of this host, over plain torch's in the same processes; regions, and overlap.

    python -m benchmarks.ranks_over_plain --ranks 2,4

In each rank three copies of GPT are trained in turn on the same text: by plain torch, in a context, and on the device.
A figure is the median over rounds of rank 0's step; its ratio is that of steps that are next to each other. Losses
that are not plain torch's end it. Each rank has one core, and where there are fewer cores than ranks these share them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS = ("ddp", "fsdp")
WAYS = ("plain", "context", "device")
CLOSE = 0.05  # of losses, which small differences drive apart


class Trained:
    """One copy of the model, trained in one way."""

    def __init__(self, way: str, kind: str, given: argparse.Namespace):
        import torch

        sys.path.insert(0, str(ROOT / "examples"))
        gpt = importlib.import_module("train_gpt")
        self.mean_of_ranks = importlib.import_module("train_gpt_ddp").mean_of_ranks
        self.way, self.gpt, self.given = way, gpt, given
        self.device = "tpu" if way == "device" else "cpu"
        torch.manual_seed(0)
        self.text = gpt.Text.load()
        alphabet = len(self.text.alphabet)
        model = gpt.GPT(alphabet, given.layers, given.dim, given.seq, dropout=0.0).to(self.device)
        if kind == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            self.model = importlib.import_module("train_gpt_fsdp").sharded(model)
        self.optimizer = gpt.make_optimizer(self.model, 1e-3)
        self.schedule = gpt.make_schedule(self.optimizer, 10_000)

    def context(self) -> AbstractContextManager[Any]:
        import fused_eager

        return fused_eager.fused_eager() if self.way == "context" else contextlib.nullcontext()

    def block(self, number: int) -> tuple[float, float]:
        """So many steps on the data of this number: the seconds of one, and the last loss."""
        import torch
        import torch.distributed as dist

        torch.manual_seed(1000 * number + dist.get_rank())
        loss = 0.0
        dist.barrier()
        with self.context():
            began = time.perf_counter()
            for _ in range(self.given.steps):
                drawn = self.gpt.draw_batch(self.text.train, self.given.batch, self.given.seq)
                batch = tuple(ids.to(self.device) for ids in drawn)
                loss = self.mean_of_ranks(self.gpt.train_step(self.model, self.optimizer, self.schedule, batch))
            seconds = (time.perf_counter() - began) / self.given.steps
        return seconds, loss


def told(steps: int) -> dict[str, Any]:
    """What the event log has of the last block."""
    from fused_eager.log.events import LOG

    sent = [e.data for e in LOG.of("collective")]
    watched = [d for d in sent if d["wait_s"] is not None]
    seconds = sum(d["seconds"] for d in watched)
    return {
        "regions": sum(e.data["regions"] for e in LOG.of("flush")) / steps,
        "collectives": len(sent) / steps,
        "compiled": len(LOG.of("compile")),
        "overlap": 1 - sum(min(d["wait_s"], d["seconds"]) for d in watched) / seconds if seconds else None,
    }


def rank(kind: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """What a rank has measured: by round, then by way."""
    import torch
    import torch.distributed as dist

    import fused_eager.tpu  # noqa: F401  (the device, and its backend)
    from fused_eager.log.events import LOG

    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,tpu:fused_eager")
    ways = [Trained(way, kind, given) for way in WAYS]
    found: list[dict[str, Any]] = []
    for number in range(given.settle + given.rounds):
        row: dict[str, Any] = {}
        for trained in ways:
            LOG.clear()
            seconds, loss = trained.block(number)
            row[trained.way] = {"seconds": seconds, "loss": loss, **told(given.steps)}
            off = abs(loss - row["plain"]["loss"]) / abs(row["plain"]["loss"])
            if off > CLOSE:
                raise SystemExit(f"the loss of {trained.way} is {loss}, and plain torch's {row['plain']['loss']}")
        found.append(row)
    dist.destroy_process_group()
    return found[given.settle :]


def launch(kind: str, world: int, argv: Sequence[str]) -> list[dict[str, Any]]:
    """What rank 0 of so many has measured."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "benchmarks.ranks_over_plain", *argv, "--rank-of", kind, "--to", folder]
        common = {
            "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "FUSED_EAGER_CACHE_DIR": f"{folder}/cache", "FUSED_EAGER_DEVICES": "1", "FUSED_EAGER_PROGRESS": "0",
        }  # fmt: skip

        ranks = [subprocess.Popen(command, env={**os.environ, **common, "RANK": str(n)}) for n in range(world)]
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        rows: list[dict[str, Any]] = json.loads(Path(folder, "0.json").read_text())
        return rows


def line(kind: str, world: int, rows: Sequence[dict[str, Any]]) -> str:
    """A line of the table for each way."""
    out = []
    for way in WAYS:
        of = [row[way] for row in rows]
        seconds = statistics.median(each["seconds"] for each in of)
        ratio = statistics.median(row["plain"]["seconds"] / row[way]["seconds"] for row in rows)
        text = f"{kind:<6}{world:>6}  {way:<9}{seconds * 1e3:>9.1f} ms{ratio:>8.2f}"
        if way != "plain":
            overlap = [each["overlap"] for each in of if each["overlap"] is not None]
            shown = f"{100 * statistics.median(overlap):.0f} %" if overlap else "?"
            regions, sent = (statistics.median(each[name] for each in of) for name in ("regions", "collectives"))
            text += f"{regions:>9.1f}{sent:>13.1f}{shown:>9}{sum(each['compiled'] for each in of):>10}"
        out.append(text)
    return "\n".join(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--kinds", default=",".join(KINDS))
    for name, number in (("layers", 4), ("dim", 128), ("seq", 64), ("batch", 8), ("steps", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--settle", type=int, default=4, help="rounds before the first one that counts")
    parser.add_argument("--rank-of", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if argv is None else argv)
    given = parser.parse_args(words)
    if given.rank_of:
        cores, number = sorted(os.sched_getaffinity(0)), int(os.environ["RANK"])
        os.sched_setaffinity(0, {cores[number % len(cores)]})  # before anything starts its threads
        Path(given.to, f"{number}.json").write_text(json.dumps(rank(given.rank_of, given)))
        return
    print(f"{'':<6}{'ranks':>6}  {'':<9}{'step':>12}{'faster':>8}{'regions':>9}{'collectives':>13}{'overlap':>9}"
          f"{'compiled':>10}")  # fmt: skip
    for kind in given.kinds.split(","):
        for world in map(int, given.ranks.split(",")):
            print(line(kind, world, launch(kind, world, words)), flush=True)


if __name__ == "__main__":
    main()
