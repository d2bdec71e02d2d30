"""What each rank of a test does: `python -m tests.frontends.collectives.ranks RANK WORLD STORE SUITE`.

Every collective is called twice, on tensors of the device and on the same of the CPU, in one group, and both are to
give the same. What went wrong is printed as JSON, by name; "" says that nothing did.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import fused_eager.tpu  # noqa: F401  (the device, and its backend)
from fused_eager import report

RANK, WORLD = (int(a) for a in sys.argv[1:3])
PROGRAMS: dict[str, dict[str, Callable[..., Any]]] = {
    "ops": {}, "training": {}, "faults": {}, "default": {}, "table": {}, "more": {},
}  # fmt: skip
ALONE = ("faults", "default", "table")  # suites whose programs say by themselves whether all is right
BACKENDS: dict[str, str | None] = {"default": None}  # by suite; any other takes the device's own by its name


def program(suite: str, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[suite][name or function.__name__] = function
        return function

    return enter


def numbers(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other numbers on each rank."""
    n = functools.reduce(lambda a, b: a * b, shape, 1)
    return ((torch.arange(n) % 7 + 1) * (RANK + 1)).to(dtype).reshape(shape).to(device)


def room(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device)


# ---- each collective, on a device named `d` -----------------------------------------------------------------------

for kind in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):

    @program("ops", f"all_reduce {kind}")
    def all_reduce(d: str, kind: str = kind) -> Any:
        x = numbers(d, 3, 2)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, kind))
        return x


for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8):

    @program("ops", f"all_reduce {dtype}")
    def of_dtype(d: str, dtype: torch.dtype = dtype) -> Any:
        x = numbers(d, 5, dtype=dtype)
        dist.all_reduce(x)
        return x


@program("ops")
def all_reduce_of_a_view(d: str) -> Any:
    x = numbers(d, 4, 3)
    dist.all_reduce(x.t())
    dist.all_reduce(x[1])
    return x


@program("ops")
def broadcast(d: str) -> Any:
    x = numbers(d, 4)
    dist.broadcast(x, src=WORLD - 1)
    return x


@program("ops")
def all_gather(d: str) -> Any:
    out = [room(d, 2) for _ in range(WORLD)]
    dist.all_gather(out, numbers(d, 2))
    return out


@program("ops")
def all_gather_of_what_lies_in_its_place(d: str) -> Any:
    """The same tensor is read and written."""
    out = [room(d, 2) for _ in range(WORLD)]
    out[RANK] += numbers(d, 2)
    dist.all_gather(out, out[RANK])
    return out


@program("ops")
def all_gather_into_tensor(d: str) -> Any:
    out = room(d, 2 * WORLD)
    dist.all_gather_into_tensor(out, numbers(d, 2))
    return out


@program("ops")
def reduce_scatter(d: str) -> Any:
    out = room(d, 2)
    dist.reduce_scatter(out, [numbers(d, 2) + k for k in range(WORLD)])
    return out


@program("ops")
def reduce_scatter_tensor(d: str) -> Any:
    out = room(d, 3)
    dist.reduce_scatter_tensor(out, numbers(d, 3 * WORLD), op=dist.ReduceOp.AVG)
    return out


@program("ops")
def all_to_all(d: str) -> Any:
    out = [room(d, 2) for _ in range(WORLD)]
    dist.all_to_all(out, [numbers(d, 2) + k for k in range(WORLD)])
    return out


@program("ops")
def all_to_all_single(d: str) -> Any:
    out = room(d, 2 * WORLD)
    dist.all_to_all_single(out, numbers(d, 2 * WORLD))
    return out


@program("ops")
def gather(d: str) -> Any:
    out = [room(d, 2) for _ in range(WORLD)] if RANK == 0 else None
    dist.gather(numbers(d, 2), out, dst=0)
    return out or []


@program("ops")
def scatter(d: str) -> Any:
    out = room(d, 2)
    dist.scatter(out, [numbers(d, 2) + k for k in range(WORLD)] if RANK == 0 else None, src=0)
    return out


@program("ops")
def reduce(d: str) -> Any:
    x = numbers(d, 2)
    dist.reduce(x, dst=1)
    return x if RANK == 1 else []


@program("ops")
def send_and_receive(d: str) -> Any:
    x = room(d, 3)
    if RANK == 0:
        dist.send(numbers(d, 3), 1)
        dist.recv(x, 1)
    elif RANK == 1:
        assert dist.recv(x) == 0  # from anybody
        dist.send(x * 5, 0)
    return x


@program("ops")
def both_ways_at_once(d: str) -> Any:
    x, other = room(d, 40000), (RANK + 1) % WORLD
    ops = [
        dist.P2POp(dist.isend, numbers(d, 40000), other),
        dist.P2POp(dist.irecv, x, (RANK - 1) % WORLD),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return x


@program("ops")
def asynchronously(d: str) -> Any:
    x, y = numbers(d, 3), numbers(d, 4)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    z = numbers(d, 3) * 2  # meanwhile
    for work in works:
        work.wait()
        assert work.is_completed()
    return x, y, z


@program("ops")
def a_future(d: str) -> Any:
    x = numbers(d, 3)
    future = dist.all_reduce(x, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * 2).wait(), x


@program("ops")
def in_a_group_of_two(d: str) -> Any:
    group = dist.new_group([0, 1])
    x = numbers(d, 3)
    if RANK < 2:
        dist.all_reduce(x, group=group)
    return x


@program("ops")
def objects(d: str) -> Any:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK, "value": numbers(d, 2)})
    given = [numbers(d, 1) if RANK == 0 else None]
    dist.broadcast_object_list(given, 0)
    return [f["value"] for f in found], given


@program("ops")
def functional_collectives(d: str) -> Any:
    group = dist.group.WORLD
    assert group is not None
    a = functional.all_reduce(numbers(d, 2), "sum", group) + 1
    b = functional.all_gather_tensor(numbers(d, 2), 0, group) + 1
    c = functional.reduce_scatter_tensor(numbers(d, 2 * WORLD), "avg", 0, group) + 1
    return a, b, c


@program("ops")
def barriers(d: str) -> Any:
    dist.barrier()
    return numbers(d, 1)


# ---- training -----------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(model: nn.Module, parameters: Any, d: str, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + RANK)
        x = torch.randn(6, 8).to(d)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@program("training")
def data_parallel(d: str) -> Any:
    model = nn.parallel.DistributedDataParallel(net().to(d))
    return torch.tensor(trained(model, model.parameters(), d)), [p.detach() for p in model.parameters()]


@program("training")
def data_parallel_in_small_buckets(d: str) -> Any:
    model = nn.parallel.DistributedDataParallel(net().to(d), bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    losses = trained(model, model.parameters(), d, 2)
    with model.no_sync():
        model(torch.ones(2, 8, device=d)).sum().backward()
    return torch.tensor(losses), [p.grad for p in model.parameters()]


@program("training")
def ranks_on_different_devices(d: str) -> Any:
    """Every other rank trains on CPU tensors: the gradients meet in one group."""
    return data_parallel(d if RANK % 2 else "cpu")


@program("training")
def fully_sharded(d: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(d, (WORLD,))
    model = net().to(d)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = trained(model, model.parameters(), d)
    return torch.tensor(losses), [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


@program("training")
def fully_sharded_with_a_factor(d: str) -> Any:
    """FSDP2 reduces with `PREMUL_SUM`, as torchtitan has it do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net().to(d)
    fully_shard(model, mesh=init_device_mesh(d, (WORLD,)))
    model.set_gradient_divide_factor(8.0)  # type: ignore[attr-defined]
    model(torch.full((2, 8), float(RANK + 1), device=d)).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


@program("training")
def sharded_tensors(d: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(d, (WORLD,))
    a = distribute_tensor(numbers(d, 4, 4), mesh, [Shard(0)])
    b = (a @ a.redistribute(mesh, [Replicate()])).sin()
    return b.full_tensor(), a.redistribute(mesh, [Shard(1)]).to_local()


# ---- other ways to train on several ranks -------------------------------------------------------------------------


@program("more")
def tensor_parallel(d: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net().to(d)
    parallelize_module(model, init_device_mesh(d, (WORLD,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # Not all parameters are sharded, and torch refuses to update both kinds in one call.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.sin(torch.arange(48.0) + step).reshape(6, 8).to(d)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


@program("more")
def sequence_parallel(d: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(d)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh(d, (WORLD,)), plan)
    part = torch.sin(torch.arange(2 * 4 * WORLD * 8.0)).reshape(2, 4 * WORLD, 8).chunk(WORLD, 1)[RANK].to(d)
    out = model(part)
    out.to_local().square().sum().backward()
    return out.full_tensor().detach(), [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


@program("more")
def optimizer_in_parts(d: str) -> Any:
    """ZeRO, stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net().to(d))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.sin(torch.arange(48.0) + step + RANK).reshape(6, 8).to(d)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@program("more")
def local_steps(d: str) -> Any:
    """Local SGD: each rank by itself, and now and then the mean."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = net().to(d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.sin(torch.arange(48.0) + step + RANK).reshape(6, 8).to(d)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return [p.detach() for p in model.parameters()]


@program("more")
def ranks_with_more_batches(d: str) -> Any:
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(net().to(d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + RANK):
            optimizer.zero_grad()
            model(torch.sin(torch.arange(48.0) + step + RANK).reshape(6, 8).to(d)).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@program("more")
def experts(d: str) -> Any:
    """A mixture of experts: tokens go to the rank of their expert and come back, with their gradients."""
    torch.manual_seed(0)
    expert = nn.Linear(8, 8).to(d)
    x = torch.sin(torch.arange(4 * WORLD * 8.0) + RANK).reshape(4 * WORLD, 8).to(d).requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    sizes = [4] * WORLD
    there = functional.all_to_all_single_autograd(x, sizes, sizes, group)
    back = functional.all_to_all_single_autograd(expert(there).relu(), sizes, sizes, group)
    back.square().sum().backward()
    return back.detach(), x.grad, [p.grad for p in expert.parameters()]


@program("more")
def a_pipeline(d: str) -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(WORLD)]
    mine = stages[RANK].to(d)
    stage = PipelineStage(mine, RANK, WORLD, torch.device(d))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, y: (out - y).square().mean())
    x, y = (torch.sin(torch.arange(32.0) + k).reshape(4, 8).to(d) for k in range(2))
    if RANK == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    return [p.grad for p in mine.parameters()]


# ---- what goes wrong, on the device alone -------------------------------------------------------------------------


@program("faults")
def a_reduction_that_has_no_meaning(d: str) -> Any:
    for dtype, op in ((torch.int64, dist._make_nccl_premul_sum(0.5)), (torch.bool, dist.ReduceOp.AVG)):
        try:
            dist.all_reduce(numbers(d, 3, dtype=dtype), op=op)
        except RuntimeError as error:
            assert ("PREMUL_SUM" in str(error) or "AVG" in str(error)) and str(dtype) in str(error), error
        else:
            raise AssertionError("nothing was raised, and nothing can have been reduced")


@program("faults")
def the_report_has_them(d: str) -> Any:
    x = numbers(d, 64) + 0
    x.cpu()  # what it takes to compile is no part of it
    dist.barrier()
    if RANK:
        time.sleep(0.3)
    dist.all_reduce(x)
    rows = [r for r in report().facts.collectives.values() if r.op == "allreduce_"]
    assert rows and all(r.ranks == WORLD and r.seconds > 0 for r in rows), rows
    assert any("ranks.py" in r.site and r.bytes >= 256 for r in rows), rows
    assert "Collectives of device tensors" in str(report())
    assert all(r.overlap is not None and (RANK or (r.overlap < 0.5 and r.wait_s > 0.1)) for r in rows), rows
    x.cpu()
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.3)  # the program goes on
    work.wait()
    later = [r for r in report().facts.collectives.values() if r.op == "allreduce_" and r not in rows]
    assert len(later) == 1 and later[0].overlap is not None and later[0].overlap > 0.5, later


@program("faults")
def a_rank_that_is_killed(d: str) -> Any:
    """Last of all: the others raise at once, and what they hold is what it was."""
    x = numbers(d, 1000)
    dist.barrier()
    if RANK == WORLD - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(50):
            dist.all_reduce(x)
    except RuntimeError as error:
        assert time.monotonic() - began < 30, "it took too long"
        assert f"Rank {RANK} waits in all_reduce at " in str(error) and "ranks.py:" in str(error), error
        assert f"rank {WORLD - 1} is lost: its process" in str(error), error
        x.cpu()
        assert (numbers(d, 3) + 1).cpu().tolist() == (numbers("cpu", 3) + 1).tolist()
        return
    raise AssertionError("a rank has gone, and nothing was raised")


@program("default")
def a_group_that_is_made_without_a_backend(d: str) -> Any:
    """torch gives it the backend of the accelerator alone."""
    model = nn.parallel.DistributedDataParallel(net().to(d))
    losses = torch.tensor(trained(model, model.parameters(), d, 2))
    found = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_gather(found, losses)
    assert not torch.equal(found[0], found[1])  # each rank has data of its own, and the same weights
    weights = numbers(d, 1) * 0 + sum(p.sum() for p in model.parameters())
    total = weights.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total.cpu(), weights.detach().cpu() * WORLD)


# ---- each collective, reduction and dtype, against what is computed from the numbers of all ranks -----------------

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *EIGHTS, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool)
KINDS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
SCALE = 0.5


def sample(rank: int, dtype: torch.dtype, n: int = 4) -> torch.Tensor:
    """What a rank gives."""
    x = (torch.arange(n) * 5 + rank * 3) % 7 + 1
    if dtype in SIGNED:
        x = x * (-1) ** (torch.arange(n) + rank)
    if dtype is torch.uint64:
        return (x + (1 << 62)).view(torch.uint64) if rank == 0 else x.to(torch.int64).neg().view(torch.uint64)
    return x % 2 == 0 if dtype is torch.bool else x.to(dtype)


def has_meaning(kind: str, dtype: torch.dtype) -> bool:
    bits = kind in ("BAND", "BOR", "BXOR")
    if dtype in COMPLEX:
        return kind in ("SUM", "AVG", "PREMUL_SUM")
    if dtype in (*FLOATS, *EIGHTS):
        return not bits
    return not (kind == "PREMUL_SUM" or (kind == "AVG" and dtype in (torch.bool, torch.uint64)))


def truth(kind: str, dtype: torch.dtype, n: int = 4) -> torch.Tensor:
    """What the reduction of all ranks' samples is, in Python's own numbers."""
    columns = zip(*(sample(rank, dtype, n).tolist() for rank in range(WORLD)), strict=True)
    of: dict[str, Callable[[Any], Any]] = {
        "SUM": lambda c: any(c) if dtype is torch.bool else sum(c),
        "AVG": lambda c: sum(c) / WORLD if dtype.is_floating_point or dtype.is_complex else int(sum(c) / WORLD),
        "PRODUCT": lambda c: functools.reduce(lambda a, b: a * b, c),
        "MIN": min, "MAX": max, "PREMUL_SUM": lambda c: sum(x * SCALE for x in c),
        "BAND": lambda c: functools.reduce(lambda a, b: a & b, c),
        "BOR": lambda c: functools.reduce(lambda a, b: a | b, c),
        "BXOR": lambda c: functools.reduce(lambda a, b: a ^ b, c),
    }  # fmt: skip
    found = [of[kind](column) for column in columns]
    if dtype is torch.uint64:
        found = [x % (1 << 64) for x in found]
    return torch.tensor(found, dtype=dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    found = found.cpu()
    assert found.dtype == expected.dtype
    if found.dtype is torch.bool:  # a byte that is neither 0 nor 1 is no boolean
        assert found.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist(), (found, expected)
    assert found.tolist() == expected.tolist(), (found.tolist(), expected.tolist())


def operation(kind: str) -> Any:
    return dist._make_nccl_premul_sum(SCALE) if kind == "PREMUL_SUM" else getattr(dist.ReduceOp, kind)


@program("table")
def each_reduction(d: str) -> Any:
    done = 0
    some = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.int64)
    for device in ("cpu", d):
        # On the device each form of a conversion is compiled: not all of them.
        for dtype in DTYPES if device == "cpu" else some:
            for kind in KINDS if device == "cpu" else ("SUM", "AVG", "MAX", "PREMUL_SUM"):
                if not has_meaning(kind, dtype):
                    continue
                try:
                    reductions(device, kind, dtype)
                except Exception as error:
                    raise AssertionError(f"{kind} of {dtype} on {device}: {error}") from error
                done += 1
    assert done > 110, done


def reductions(device: str, kind: str, dtype: torch.dtype) -> None:
    expected, op = truth(kind, dtype), operation(kind)
    x = sample(RANK, dtype).to(device)
    dist.all_reduce(x, op=op)
    same(x, expected)
    x = sample(RANK, dtype).to(device)
    work = dist.all_reduce(x, op=op, async_op=True)
    work.wait()
    same(x, expected)
    out, part = torch.zeros(4 // WORLD, dtype=dtype).to(device), expected.chunk(WORLD)[RANK]
    dist.reduce_scatter_tensor(out, sample(RANK, dtype).to(device), op=op)
    same(out, part)
    out = torch.zeros(4 // WORLD, dtype=dtype).to(device)
    dist.reduce_scatter(out, [t.contiguous() for t in sample(RANK, dtype).to(device).chunk(WORLD)], op=op)
    same(out, part)
    x = sample(RANK, dtype).to(device)
    dist.reduce(x, dst=1, op=op)
    if RANK == 1:
        same(x, expected)


@program("table")
def each_way_to_move(d: str) -> Any:
    for device in ("cpu", d):
        for dtype in DTYPES if device == "cpu" else (torch.float8_e4m3fn, torch.int16, torch.bool, torch.complex64):
            try:
                moves(device, dtype)
            except Exception as error:
                raise AssertionError(f"{dtype} on {device}: {error}") from error


def moves(device: str, dtype: torch.dtype) -> None:
    of = [sample(rank, dtype) for rank in range(WORLD)]
    mine = of[RANK].to(device)

    def room(n: int = 4) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype).to(device)

    x = mine.clone()
    dist.broadcast(x, src=1)
    same(x, of[1])
    out = room(4 * WORLD)
    dist.all_gather_into_tensor(out, mine)
    same(out, torch.cat(of))
    outs = [room() for _ in range(WORLD)]
    dist.all_gather(outs, mine)
    for found, expected in zip(outs, of, strict=True):
        same(found, expected)
    out, n = room(), 4 // WORLD
    dist.all_to_all_single(out, mine)
    same(out, torch.cat([t[RANK * n : (RANK + 1) * n] for t in of]))
    outs = [room() for _ in range(WORLD)]
    dist.gather(mine, outs if RANK == 0 else None, dst=0)
    if RANK == 0:
        for found, expected in zip(outs, of, strict=True):
            same(found, expected)
    out = room()
    dist.scatter(out, [t.to(device) for t in of] if RANK == 0 else None, src=0)
    same(out, of[RANK])
    out = room()
    if RANK == 0:
        dist.send(mine, 1)
    elif RANK == 1:
        dist.recv(out, 0)
        same(out, of[0])


# ---- groups, handles, timeouts ------------------------------------------------------------------------------------


@program("table")
def new_groups(d: str) -> Any:
    for device in ("cpu", d):
        own = [dist.new_group([rank]) for rank in range(WORLD)][RANK]
        x = numbers(device, 3)
        dist.all_reduce(x, group=own)
        same(x, numbers("cpu", 3))
        backwards = dist.new_group(list(range(WORLD)), backend="fused_eager", timeout=timedelta(seconds=30))
        dist.all_reduce(x, group=backwards)
        same(x, sum(((torch.arange(3) % 7 + 1) * (r + 1)).to(torch.float32) for r in range(WORLD)))
        mine, _ = dist.new_subgroups(1)
        assert dist.get_world_size(mine) == 1
        dist.destroy_process_group(backwards)


@program("table")
def several_at_once(d: str) -> Any:
    """A coalescing manager, and a list of tensors."""
    total = WORLD * (WORLD + 1) // 2
    for device in ("cpu", d):
        xs = [torch.full((3,), float(RANK + 1 + k), device=device) for k in range(3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        for k, x in enumerate(xs):
            assert x.tolist() == [total + WORLD * k] * 3
        dist.all_reduce_coalesced(xs, op=dist.ReduceOp.AVG)
        for k, x in enumerate(xs):
            assert x.tolist() == [total + WORLD * k] * 3


@program("table")
def handles(d: str) -> Any:
    for device in ("cpu", d):
        x = numbers(device, 5)
        work = dist.all_reduce(x, op=operation("PREMUL_SUM"), async_op=True)
        future = work.get_future().then(lambda f: [t.cpu().tolist() for t in f.value()])
        expected = (sum(((torch.arange(5) % 7 + 1) * (r + 1)).to(torch.float32) for r in range(WORLD)) * SCALE).tolist()
        assert future.wait() == [expected]
        assert work.wait() and x.tolist() == expected


@program("table")
def barriers_that_are_watched(d: str) -> Any:
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    if RANK == 0:
        began = time.monotonic()
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
        except RuntimeError as error:
            assert time.monotonic() - began < 20 and "1" in str(error), error
        else:
            raise AssertionError("nobody else has come")


def differ(a: Any, b: Any) -> str:
    """What is different in two results of the same shape."""
    if isinstance(a, (list, tuple)):
        return next((d for x, y in zip(a, b, strict=True) if (d := differ(x, y))), "")
    torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=1e-6)
    return ""


def main() -> None:
    store, suite = sys.argv[3:5]
    warnings.simplefilter("ignore")
    dist.init_process_group(
        BACKENDS.get(suite, "fused_eager"), init_method=f"file://{store}", rank=RANK, world_size=WORLD,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    said: dict[str, str] = {}
    for name, run in PROGRAMS[suite].items():
        try:
            found = run("tpu")
            said[name] = "" if suite in ALONE else differ(found, copy.copy(run("cpu")))
        except Exception:
            said[name] = traceback.format_exc()
            break  # the ranks are out of step
    print(json.dumps(said), flush=True)
    os._exit(0)  # a group that has lost a rank waits for it


if __name__ == "__main__":
    assert tempfile.gettempdir()
    main()
