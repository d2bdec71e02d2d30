"""A program for `--ranks-in-process`: what goes wrong on one of four ranks, and what looks as if it did.

It knows nothing of the library. `CASES` are called by name.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def ones() -> torch.Tensor:
    return torch.ones(4, device="tpu")


def throws(folder: str) -> None:
    if RANK == 2:
        raise ValueError("a bad batch")


def leaves(folder: str) -> None:
    if RANK == 2:
        sys.exit(3)


def ends_early(folder: str) -> None:
    if RANK == 2:
        sys.exit(0)


def differs(folder: str) -> None:
    dist.broadcast(ones(), 0) if RANK == 1 else dist.all_reduce(ones())


def differs_in_shape(folder: str) -> None:
    dist.all_reduce(torch.ones(RANK + 1, device="tpu"))


def wait_in_a_circle(folder: str) -> None:
    dist.recv(ones(), (RANK + 1) % WORLD)


def cannot_be_reduced(folder: str) -> None:
    dist.all_reduce(ones(), op=dist.ReduceOp.BAND)


def thread(folder: str) -> None:
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(dist.all_reduce, ones()).result()


def fine(folder: str) -> None:
    """What has to work: each part waits in a way of its own."""
    flag = os.path.join(folder, "flag")
    if RANK == WORLD - 1:
        Path(flag).touch()
    while not os.path.exists(flag):
        time.sleep(0.01)
    work = dist.all_reduce(ones(), async_op=True)
    while not work.is_completed():
        pass
    port = int(Path(folder, "port").read_text())
    store = dist.TCPStore("localhost", port, WORLD, RANK == 0)
    store.set(f"rank {RANK}", "here")
    store.wait([f"rank {(RANK + 1) % WORLD}"])
    # What each draws is what it would draw alone.
    torch.manual_seed(RANK)
    random.seed(RANK)
    dist.barrier()
    drawn, number = torch.randn(3), random.random()
    assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(RANK)))
    assert number == random.Random(RANK).random()
    assert ones().device.index == torch.ones(2).to("tpu").device.index == RANK
    both = [torch.zeros(3, device="tpu") for _ in range(WORLD)]
    on_device = torch.randn(3, device="tpu")
    dist.all_gather(both, on_device)
    torch.manual_seed(RANK)
    torch.manual_seed(RANK)
    torch.randn(3)
    assert torch.equal(torch.randn(3, device="tpu").cpu(), both[RANK].cpu())
    assert len({tuple(t.tolist()) for t in both}) == WORLD
    with torch.tpu.distributed.spmd_safe():
        dist.all_reduce(t := ones() * RANK)
    assert t.tolist() == [6.0] * 4
    assert torch.tpu.distributed.spmd_safe(ones)().tolist() == [1.0] * 4
    # Who has caught it goes on in a new group.
    try:
        dist.all_reduce(torch.ones(RANK + 1, device="tpu"))
    except RuntimeError as error:
        assert "CollectivesDiffer" in type(error).__name__
    else:
        raise AssertionError("it did not differ")
    dist.destroy_process_group()
    dist.init_process_group()
    t = ones()
    dist.all_reduce(t)
    assert t.tolist() == [4.0] * 4


CASES: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        *(throws, leaves, ends_early, differs, differs_in_shape, wait_in_a_circle, cannot_be_reduced, thread, fine),
    )
}

if __name__ == "__main__":
    dist.init_process_group()
    t = ones()
    dist.all_reduce(t)
    CASES[sys.argv[1]](sys.argv[2])
    dist.all_reduce(t)
    print(f"rank {RANK} has {t.tolist()}", flush=True)
