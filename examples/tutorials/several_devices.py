"""The tutorial "Several devices": two ranks train a model, a report shows who waits for whom, and one of them dies."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fused_eager.tpu  # noqa: F401  (the device, and its process group)
from fused_eager import RankLost
from fused_eager.reporting.report import Report


def train(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).to("tpu")
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        own = torch.Generator().manual_seed(100 * step + rank)  # each rank has data of its own
        x = torch.randn(8, 16, generator=own).to("tpu")
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 1:
            time.sleep(0.05)  # something that only this rank does
    dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.AVG)
    print(f"rank {rank}: the mean of the losses is {loss.item():.2f}", flush=True)
    dist.destroy_process_group()


def lose(rank):
    total = torch.ones(3, device="tpu")
    dist.all_reduce(total)
    print(f"rank {rank}: {total.tolist()}", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory is short
    try:
        dist.all_reduce(total)
        print(total.tolist())
    except RankLost as error:
        print(f"rank {rank}: rank {error.rank} is lost", flush=True)


def main():
    rank = int(os.environ["RANK"])
    what, store = sys.argv[1:]
    dist.init_process_group("fused_eager", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    {"train": train, "lose": lose}[what](rank)


def start(what, folder):
    """Run a function on two ranks, as `torchrun --nproc-per-node 2` does for a program."""
    ranks = []
    for rank in range(2):
        given = {"RANK": f"{rank}", "FUSED_EAGER_DEVICES": "1", "FUSED_EAGER_REPORT": str(folder / f"{what}.jsonl")}
        command = [sys.executable, __file__, what, str(folder / what)]
        ranks.append(subprocess.Popen(command, env={**os.environ, **given}, stderr=subprocess.DEVNULL))
    return [rank.wait() for rank in ranks]


if __name__ == "__main__" and "RANK" in os.environ:
    main()
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start("train", folder)
        for advice in Report.read(folder / "train.jsonl").advice:
            if advice.kind.startswith("collective."):
                print(f"{advice.kind}: {advice.title}")
        start("lose", folder)
