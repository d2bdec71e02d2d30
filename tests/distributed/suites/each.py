"""Each collective."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from . import RANK, WORLD, numbers, program, room

for kind in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):

    @program("each", f"all_reduce {kind}")
    def all_reduce(d: str, kind: str = kind) -> Any:
        x = numbers(d, 3, 2)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, kind))
        return x


for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8):

    @program("each", f"all_reduce {dtype}")
    def of_dtype(d: str, dtype: torch.dtype = dtype) -> Any:
        x = numbers(d, 5, dtype=dtype)
        dist.all_reduce(x)
        return x


@program("each")
def all_reduce_of_a_view(d: str) -> Any:
    x = numbers(d, 4, 3)
    dist.all_reduce(x.t())
    dist.all_reduce(x[1])
    return x


@program("each")
def broadcast(d: str) -> Any:
    x = numbers(d, 4)
    dist.broadcast(x, src=WORLD - 1)
    return x


@program("each")
def all_gather(d: str) -> Any:
    out = [room(d, 2) for _ in range(WORLD)]
    dist.all_gather(out, numbers(d, 2))
    return out


@program("each")
def all_gather_of_what_lies_in_its_place(d: str) -> Any:
    """The same tensor is read and written."""
    out = [room(d, 2) for _ in range(WORLD)]
    out[RANK] += numbers(d, 2)
    dist.all_gather(out, out[RANK])
    return out


@program("each")
def all_gather_into_tensor(d: str) -> Any:
    out = room(d, 2 * WORLD)
    dist.all_gather_into_tensor(out, numbers(d, 2))
    return out


@program("each")
def as_one_row(d: str) -> Any:
    """Whose first dimension is not one of as many as there are ranks: gloo itself refuses it."""
    out, piece = room(d, 1, 3 * WORLD, 2), room(d, 1, 3, 2)
    if dist.get_backend() == "gloo":
        return []
    dist.all_gather_into_tensor(out, numbers(d, 3, 2))
    dist.reduce_scatter_tensor(piece, numbers(d, 1, 3 * WORLD, 2))
    return out, piece


@program("each")
def reduce_scatter(d: str) -> Any:
    out = room(d, 2)
    dist.reduce_scatter(out, [numbers(d, 2) + k for k in range(WORLD)])
    return out


@program("each")
def reduce_scatter_tensor(d: str) -> Any:
    out = room(d, 3)
    dist.reduce_scatter_tensor(out, numbers(d, 3 * WORLD), op=dist.ReduceOp.AVG)
    return out


@program("each")
def all_to_all(d: str) -> Any:
    out = [room(d, 2) for _ in range(WORLD)]
    parts = [numbers(d, 2) + k for k in range(WORLD)]
    try:
        dist.all_to_all(out, parts)
    except RuntimeError as error:
        if d != "cpu" or "gloo does not support alltoall" not in str(error):
            raise
        whole = room(d, 2 * WORLD)  # in torch 2.11 gloo has it for one tensor alone
        dist.all_to_all_single(whole, torch.cat(parts))
        out = list(whole.split(2))
    return out


@program("each")
def all_to_all_single(d: str) -> Any:
    out = room(d, 2 * WORLD)
    dist.all_to_all_single(out, numbers(d, 2 * WORLD))
    return out


@program("each")
def gather(d: str) -> Any:
    out = [room(d, 2) for _ in range(WORLD)] if RANK == 0 else None
    dist.gather(numbers(d, 2), out, dst=0)
    return out or []


@program("each")
def scatter(d: str) -> Any:
    out = room(d, 2)
    dist.scatter(out, [numbers(d, 2) + k for k in range(WORLD)] if RANK == 0 else None, src=0)
    return out


@program("each")
def reduce(d: str) -> Any:
    x = numbers(d, 2)
    dist.reduce(x, dst=1)
    return x if RANK == 1 else []


@program("each")
def send_and_receive(d: str) -> Any:
    x = room(d, 3)
    if RANK == 0:
        dist.send(numbers(d, 3), 1)
        dist.recv(x, 1)
    elif RANK == 1:
        assert dist.recv(x) == 0  # from anybody
        dist.send(x * 5, 0)
    return x


@program("each")
def both_ways_at_once(d: str) -> Any:
    x, other = room(d, 40000), (RANK + 1) % WORLD
    ops = [
        dist.P2POp(dist.isend, numbers(d, 40000), other),
        dist.P2POp(dist.irecv, x, (RANK - 1) % WORLD),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return x


@program("each")
def asynchronously(d: str) -> Any:
    x, y = numbers(d, 3), numbers(d, 4)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    z = numbers(d, 3) * 2  # meanwhile
    for work in works:
        work.wait()
        assert work.is_completed()
    return x, y, z


@program("each")
def asked_until_it_is_there(d: str) -> Any:
    """Nobody waits, and what a completed collective has written is read."""
    x, parts = numbers(d, 3), [room(d, 3) for _ in range(WORLD)]
    works = [dist.all_reduce(x, async_op=True), dist.all_gather(parts, numbers(d, 3) * 2, async_op=True)]
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    return x, parts


@program("each")
def used_in_many_ways(d: str) -> Any:
    """What a collective has written, overwritten, looked at in parts, kept from before, written again."""
    x, flat = numbers(d, 6), room(d, 2 * WORLD)
    before, part = x + 1, x[2:4]
    dist.all_reduce(x)
    after = part * 2
    dist.all_reduce(x)
    copy = x.clone()
    dist.all_reduce(x)
    x.zero_()
    dist.all_gather_into_tensor(flat, numbers(d, 2))
    tail = flat[-2:].tolist()
    y = numbers(d, 3)
    dist.all_reduce(y)
    y.data = numbers(d, 3) + 5  # laid elsewhere: what was sent is not for it
    z = numbers(d, 3).requires_grad_()
    w = z * 2
    dist.all_reduce(w.detach())
    dist.broadcast(flat, 0)
    flat[0] = 7
    w.sum().backward()
    return before, after, copy, x, torch.tensor(tail), y, flat, z.grad


@program("each")
def a_future(d: str) -> Any:
    x = numbers(d, 3)
    future = dist.all_reduce(x, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * 2).wait(), x


@program("each")
def in_a_group_of_two(d: str) -> Any:
    group = dist.new_group([0, 1])
    x = numbers(d, 3)
    if RANK < 2:
        dist.all_reduce(x, group=group)
    return x


@program("each")
def objects(d: str) -> Any:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK, "value": numbers(d, 2)})
    given = [numbers(d, 1) if RANK == 0 else None]
    dist.broadcast_object_list(given, 0)
    return [f["value"] for f in found], given


@program("each")
def functional_collectives(d: str) -> Any:
    group = dist.group.WORLD
    assert group is not None
    a = functional.all_reduce(numbers(d, 2), "sum", group) + 1
    b = functional.all_gather_tensor(numbers(d, 2), 0, group) + 1
    c = functional.reduce_scatter_tensor(numbers(d, 2 * WORLD), "avg", 0, group) + 1
    return a, b, c


@program("each")
def barriers(d: str) -> Any:
    dist.barrier()
    return numbers(d, 1)
