"""A rank of a training whose log is kept: `python -m tests.distributed.cold DOOR`, started as torchrun starts it."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

STEPS = 5
WIDTH = 64


def main(door: str) -> None:
    import fused_eager

    torch.set_num_threads(1)
    if door == "device":
        import fused_eager.tpu
    rank = int(os.environ["RANK"])
    device = "tpu" if door == "device" else "cpu"
    dist.init_process_group("fused_eager" if door == "device" else "gloo")
    with contextlib.nullcontext() if door == "device" else fused_eager.fused_eager():
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 8)]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            if rank == 1:
                time.sleep(0.3)  # the last one, in each step
            x = torch.sin(torch.arange(16.0 * WIDTH).reshape(16, WIDTH) + step + rank).to(device)
            model(x).square().mean().backward()
            total = torch.full((WIDTH,), float(rank), device=device)
            dist.all_reduce(total)
            assert total[0].item() == sum(range(dist.get_world_size()))
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
