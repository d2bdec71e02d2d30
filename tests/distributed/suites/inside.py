"""Collectives inside regions: a step of training is one program of all ranks, and where one rank differs it is cut, in
agreement, and comes to the same.

In plain torch there are no regions, and a program that counts other ones than it expects says so itself.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fused_eager.log.events import LOG

from . import RANK, WORLD, numbers, program, waves

STEPS = 6
COUNTS = os.environ.get("FUSED_EAGER_COLLECTIVES") == "regions" and "FUSED_EAGER_MODE" not in os.environ


def trained(d: str, differs: Any = None, batch: int = 4) -> tuple[Any, list[list[bool]]]:
    """Losses and parameters of DDP in two buckets; and for each step how its collectives ran, inside of regions or by
    themselves. `differs(step, loss)` is called in the middle of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).to(d)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, ways = [], []
    for step in range(STEPS):
        x = waves(d, batch, 16, shift=step + RANK)
        LOG.clear()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if differs is not None:
            differs(step, loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ways.append([e.data["together"] for e in LOG.of("agreement")])
    return (torch.tensor(losses), [p.detach() for p in model.parameters()]), ways


@program("inside")
def a_step_is_one_program(d: str) -> Any:
    found, ways = trained(d)
    assert not (COUNTS and d != "cpu") or all(way == [True] for way in ways[2:]), ways
    flushes = LOG.of("flush")
    assert not (COUNTS and d != "cpu") or sum(e.data["regions"] for e in flushes) == 1, [e.data for e in flushes]
    return found


@program("inside")
def a_rank_reads_its_loss_in_the_middle(d: str) -> Any:
    read: list[float] = []

    def differs(step: int, loss: torch.Tensor) -> None:
        if RANK == 1 and step == 4:
            read.append(loss.item())

    found, ways = trained(d, differs)
    if COUNTS and d != "cpu" and RANK == 0:  # what the other read ended its stream: the rest was another one
        assert [all(way) for way in ways[2:]] == [True, True, False, True], ways
    return found


@program("inside")
def ranks_have_batches_of_their_own(d: str) -> Any:
    found, ways = trained(d, batch=3 + RANK)
    assert not (COUNTS and d != "cpu") or not any(together for way in ways[2:] for together in way), ways
    return found


@program("inside")
def a_rank_does_something_else_meanwhile(d: str) -> Any:
    """One reads what all have computed, and tells the others by the store: who waits for that has called the
    collective, and reads nothing."""
    x = numbers(d, 8)
    y = x * 2
    dist.all_reduce(y)
    store = dist.distributed_c10d._get_default_store()
    if RANK == 0:
        store.set(f"told/{d}", str(y.sum().item()))
    store.wait([f"told/{d}"])
    return y + 1


@program("inside")
def alike_and_computed_in_other_orders(d: str) -> Any:
    """Two sums of equal shape: the operands are made in an order that each rank has for itself."""
    x = numbers(d, 6)
    if RANK % 2:
        b = x * 3 + 1
        a = x * 3 - 1
    else:
        a = x * 3 - 1
        b = x * 3 + 1
    dist.all_reduce(a)
    dist.all_reduce(b)
    return a, b


@program("inside")
def only_the_first_rank_reads_it(d: str) -> Any:
    """The others take part all the same."""
    x, y = numbers(d, 4), numbers(d, 3)
    dist.all_reduce(x)
    kept = (x,) if RANK == 0 else ()
    del x
    dist.all_reduce(y)
    return *kept, y


@program("inside")
def of_two_groups(d: str) -> Any:
    both, x = dist.new_group(list(range(WORLD))), numbers(d, 5)
    own = [dist.new_group([r]) for r in range(WORLD)][RANK]
    y = x + 1
    dist.all_reduce(y, group=both)
    z = y * 2
    dist.all_reduce(z, group=own)
    dist.broadcast(z, 1)
    return y, z


@program("inside")
def functional_ones(d: str) -> Any:
    from torch.distributed import _functional_collectives as functional

    x = waves(d, 4)
    y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    z = functional.all_gather_tensor(x.exp(), 0, dist.group.WORLD)
    return y + 1, z.sum()
