"""Ranks that do not run the same ops: what they call together is the same collectives, in the same order."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import RANK, WORLD, numbers, program, waves
from .training import net


def replicas(d: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.parallel.DistributedDataParallel(net().to(d), bucket_cap_mb=1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@program("differing")
def one_logs(d: str) -> Any:
    model, optimizer = replicas(d)
    seen: list[float] = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(waves(d, 6, 8, shift=step + RANK)).square().mean()
        if RANK == 0:
            seen.append(round(loss.item(), 4))
            str(loss)
        loss.backward()
        if RANK == 0:
            seen.append(round(float(sum(p.grad.norm() for p in model.parameters())), 3))
        optimizer.step()
    return seen, [p.detach() for p in model.parameters()]


@program("differing")
def one_evaluates(d: str) -> Any:
    model, optimizer = replicas(d)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        model(waves(d, 6, 8, shift=step + RANK)).square().mean().backward()
        optimizer.step()
        if RANK == WORLD - 1:
            model.eval()
            with torch.no_grad():
                for part in range(3):
                    found.append(model.module(waves(d, 4 + part, 8)).square().mean())  # type: ignore[operator]
            model.train()
        if step == 2:
            dist.barrier()
    return found, [p.detach() for p in model.parameters()]


@program("differing")
def one_saves(d: str) -> Any:
    """And loads it again; the others have it from him."""
    model, optimizer = replicas(d)
    saved = io.BytesIO()
    for step in range(4):
        optimizer.zero_grad()
        model(waves(d, 6, 8, shift=step + RANK)).square().mean().backward()
        optimizer.step()
        if RANK == 0 and step == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    if RANK == 0:
        saved.seek(0)
        model.load_state_dict(torch.load(saved)["model"])
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return [p.detach() for p in model.parameters()]


@program("differing")
def batches_of_other_shapes(d: str) -> Any:
    model, optimizer = replicas(d)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(waves(d, 2 + 3 * RANK + step % 2, 8, shift=step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.detach() for p in model.parameters()]


@program("differing")
def other_work_between(d: str) -> Any:
    """Each rank computes something else between collectives of other sizes; one gives its own up for a moment."""
    total = numbers(d, 5)
    for turn in range(4):
        for _ in range(RANK + turn):
            total = (total * 0.5).sin() + RANK
        dist.all_reduce(total)
        if (turn + RANK) % 2:
            total.sum().item()
        parts = [torch.zeros(5, device=d) for _ in range(WORLD)]
        dist.all_gather(parts, total + RANK)
        total = torch.stack(parts).mean(0)
    return total


@program("differing")
def branches_of_their_own(d: str) -> Any:
    """Which parameters are used depends on the rank."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(WORLD + 1)]).to(d)

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
            return self.parts[at % WORLD](self.parts[WORLD](x)).tanh()

    ddp = nn.parallel.DistributedDataParallel(Branch(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ddp(waves(d, 4, 8, shift=step + RANK), step + RANK).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in ddp.parameters()]


@program("differing")
def words(d: str) -> Any:
    """Object collectives of what is not computed yet, and of other sizes."""
    mine = {"rank": RANK, "sum": (numbers(d, 3 + RANK) * 2).sum(), "name": "x" * (5 * RANK + 1)}
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, mine)
    at_the_last = [None] * WORLD if RANK == WORLD - 1 else None
    dist.gather_object(mine["name"], at_the_last, dst=WORLD - 1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [numbers(d, 2) + k for k in range(WORLD)] if RANK == 0 else None, src=0)
    sent = [numbers(d, 4), "word"] if RANK == 0 else [None, None]
    if RANK == 0:
        dist.send_object_list(sent, 1)
    elif RANK == 1:
        dist.recv_object_list(sent, 0)
    given = [numbers(d, 2) if RANK == 1 else None]
    dist.broadcast_object_list(given, 1)
    return [[g["sum"] for g in gathered], [g["name"] for g in gathered], at_the_last, scattered, given]
