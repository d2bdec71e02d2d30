"""A process that spawns ranks several times, as a notebook does; and, with an argument, one that is interrupted."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fused_eager.tpu


def sums(rank: int, expected: float) -> None:
    dist.init_process_group()  # and leaves it behind
    t = torch.full((2,), rank + 1.0, device="tpu")
    dist.all_reduce(t)
    assert t.tolist() == [expected] * 2


def fails(rank: int) -> None:
    dist.init_process_group()
    if rank == 1:
        raise ValueError("a bad batch")
    dist.barrier()


def spawns(rank: int) -> None:
    torch.tpu.distributed.spawn(sums, (1.0,), 2)


def loads(rank: int) -> None:
    dist.init_process_group()
    data = TensorDataset(torch.arange(16.0).reshape(16, 1))
    total = torch.zeros(1, device="tpu")
    for (x,) in DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=3), num_workers=1):
        total += x.to("tpu").sum()
    dist.all_reduce(total)
    assert total.item() == 120.0


def compiles(rank: int) -> None:
    dist.init_process_group()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to("tpu")
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model))
    for _ in range(2):
        compiled(torch.ones(2, 8, device="tpu") * rank).sum().backward()
    found: list[list[float]] = [[], []]
    dist.all_gather_object(found, [p.grad.sum().item() for p in model.parameters() if p.grad is not None])
    assert found[0] == found[1] and len(found[0]) == 4


def never_waits(rank: int) -> None:
    dist.init_process_group()
    if rank == 1:
        print("running", flush=True)
        while True:
            sum(range(1000))
    dist.barrier()


def main() -> None:
    spawn = torch.tpu.distributed.spawn
    if sys.argv[1:]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
        spawn(never_waits, (), 2)
    spawn(sums, (3.0,), 2)
    for function, words in ((fails, "a bad batch"), (spawns, "is a rank already")):
        try:
            spawn(function, (), 2)
        except (ValueError, fused_eager.FusedEagerError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{function.__name__} has not failed")
        assert not dist.is_initialized() and "RANK" not in os.environ and torch.tpu.current_device() == 0
    for function in (loads, compiles):
        spawn(function, (), 2)
    spawn(sums, (6.0,), 3)
    print("done")


if __name__ == "__main__":
    main()
