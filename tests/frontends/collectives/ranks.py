"""What a rank of a test does: `python -m tests.frontends.collectives.ranks STORE SUITE`; RANK and WORLD_SIZE are set.

The programs say by themselves whether all is right. What went wrong is printed as JSON, by name; "" says that nothing
did. Programs that do on the device what they do on the CPU are in `tests/distributed/suites`.
"""

from __future__ import annotations

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
from torch import nn
from torch.distributed.fsdp import fully_shard

import fused_eager.tpu  # noqa: F401  (the device, and its backend)
from fused_eager import report
from tests.distributed.suites import PROGRAMS, RANK, WORLD, numbers, program, room
from tests.distributed.suites.training import net, trained

BACKENDS: dict[str, str | None] = {"default": None}  # by suite; any other takes the device's own by its name


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
    x.cpu()
    rows = [r for r in report().facts.collectives.values() if r.op == "allreduce_"]
    assert rows and all(r.ranks == WORLD and r.seconds > 0 for r in rows), rows
    assert any("ranks.py" in r.site and r.bytes >= 256 for r in rows), rows
    assert "Collectives (how often" in str(report())
    assert all(r.overlap is not None and (RANK or (r.overlap < 0.5 and r.wait_s > 0.1)) for r in rows), rows
    x.cpu()
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.3)  # the program goes on
    work.wait()
    later = [r for r in report().facts.collectives.values() if r.op == "allreduce_" and r not in rows]
    assert len(later) == 1 and later[0].overlap is not None and later[0].overlap > 0.5, later


@program("faults")
def a_collective_is_waited_for_where_its_result_is_used(d: str) -> Any:
    """Not at its line, without `async_op`, nor where something else is computed."""
    x, other = torch.arange(8.0, device=d) + RANK, numbers(d, 9) + 0
    for t in (x, other * 2):  # what it takes to compile is no part of it
        t.cpu()
    store = dist.distributed_c10d._get_default_store()
    if RANK:  # which would not come if rank 0 waited at its line
        store.wait(["has gone on"], timedelta(seconds=60))
    dist.all_reduce(x)
    part, doubled = x[2:4], (other * 2).cpu()
    if not RANK:
        store.set("has gone on", "")
    expected = WORLD * torch.arange(8.0) + sum(range(WORLD))
    assert torch.equal(part.cpu(), expected[2:4]) and torch.equal(x.cpu(), expected)
    assert torch.equal(doubled, numbers("cpu", 9) * 2)


@program("faults")
def what_a_collective_cannot_do_is_raised_at_its_line_or_each_time_that_its_result_is_used(d: str) -> Any:
    x = numbers(d, 4)
    for use in (lambda: dist.all_reduce(x, op=dist.ReduceOp.BAND), lambda: x.tolist(), lambda: (x + 1).tolist()):
        try:
            if use() is not None:
                raise AssertionError("no number can have come of it")
        except RuntimeError as error:
            assert "BAND" in str(error) and "allreduce of rank" in str(error) and "ranks.py:" in str(error), error
            if "all_reduce" in "".join(traceback.format_tb(error.__traceback__)):
                return  # at its line


@program("faults")
def a_rank_that_is_killed(d: str) -> Any:
    """Last of all: the others raise at once, as often as they use what has not come; what they hold is what it was."""
    x, kept = numbers(d, 1000), numbers(d, 3) + 1
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
        try:
            x.cpu()
        except RuntimeError as again:
            assert f"rank {WORLD - 1} is lost" in str(again), again
        else:
            raise AssertionError("the sum has not come") from error
        assert kept.tolist() == (numbers("cpu", 3) + 1).tolist()
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
    if dtype in (*SIGNED, *UNSIGNED):  # a product of many wraps around
        least = torch.iinfo(dtype).min
        found = [(x - least) % (1 << 8 * dtype.itemsize) + least for x in found]
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
        x = numbers(device, 5)
        until_it_is_there(dist.all_reduce(x, op=operation("PREMUL_SUM"), async_op=True))
        assert x.tolist() == expected
    part = room(d, 5)
    until_it_is_there(dist.reduce_scatter_tensor(part, numbers(d, 5).repeat(WORLD), async_op=True))
    assert part.tolist() == numbers("cpu", 5).div(RANK + 1).mul(WORLD * (WORLD + 1) // 2).tolist()


def until_it_is_there(work: Any) -> None:
    """Ask a work whether it is completed. Gloo's own of a reduce-scatter never says so."""
    deadline = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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


# ---- a group that was told its device, as NCCL's are ---------------------------------------------------------------


@program("groups")
def a_group_is_split(d: str) -> Any:
    assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id == torch.device("tpu", 0)
    halves = [[r for r in range(WORLD) if r % 2 == k] for k in range(2)]
    mine = dist.split_group(split_ranks=halves)
    x = torch.full((2,), float(RANK), device=d)
    dist.all_reduce(x, group=mine)
    assert mine.size() == len(halves[RANK % 2]) and x.tolist() == [float(sum(halves[RANK % 2]))] * 2
    again = dist.split_group(split_ranks=halves, group_desc="again", timeout=timedelta(seconds=20))
    assert again is not mine and again.group_desc == "again" and mine.group_desc.endswith(":split")
    part = dist.split_group(mine, split_ranks=[[0]])  # of the parent's ranks
    assert (part is not None) == (RANK < 2) and (part is None or dist.get_process_group_ranks(part) == [RANK])
    assert (dist.split_group(split_ranks=[[0]]) is not None) == (RANK == 0)


@program("groups")
def lists_that_cannot_be_split_by(d: str) -> Any:
    for ranks, what in (([[0, 0]], "duplicate"), ([[]], "empty"), ([[0, 99]], "99"), ([], "empty")):
        try:
            dist.split_group(split_ranks=ranks)
        except ValueError as error:
            assert what in str(error), error
        else:
            raise AssertionError(f"{ranks} were taken")


@program("groups")
def meshes_are_made_of_split_groups(d: str) -> Any:
    mesh = dist.device_mesh.init_device_mesh("tpu", (WORLD // 2, 2), mesh_dim_names=("outer", "inner"))
    assert mesh["inner"].get_group().size() == 2 and mesh["outer"].get_group().size() == WORLD // 2
    model = nn.Linear(4, 4).to(d)
    for p in model.parameters():
        nn.init.ones_(p)
    fully_shard(model, mesh=mesh)
    model(torch.full((2, 4), RANK + 1.0, device=d)).sum().backward()
    grad: Any = model.weight.grad
    assert grad.full_tensor().tolist() == [[WORLD + 1.0] * 4] * 4, grad.full_tensor()


@program("groups")
def several_collectives_together(d: str) -> Any:
    manager: Any = dist.distributed_c10d._coalescing_manager
    for device in (d, "cpu"):
        for waits in (True, False):
            xs = [torch.full((2,), float(RANK + i), device=device) for i in range(3)]
            with manager(device=torch.device(device), async_ops=not waits) as together:
                for x in xs:
                    dist.all_reduce(x)
            if not waits:
                together.wait()
            total = sum(range(WORLD))
            assert [x.tolist() for x in xs] == [[float(total + i * WORLD)] * 2 for i in range(3)]
        outs = [torch.zeros(WORLD, device=device) for _ in range(2)]
        with manager(device=torch.device(device)):
            for i, out in enumerate(outs):
                dist.all_gather_into_tensor(out, torch.full((1,), float(RANK + i), device=device))
        assert [out.tolist() for out in outs] == [[float(r + i) for r in range(WORLD)] for i in range(2)]
        with manager(device=torch.device(device)):  # which torch does not make one of
            y = torch.full((2,), float(RANK), device=device)
            dist.broadcast(y, 1)
        assert y.tolist() == [1.0, 1.0]
    with manager(device=torch.device(d), async_ops=True) as together:
        pass
    together.wait()


def main() -> None:
    store, suite = sys.argv[1:3]
    warnings.simplefilter("ignore")
    dist.init_process_group(
        BACKENDS.get(suite, "fused_eager"), init_method=f"file://{store}", rank=RANK, world_size=WORLD,
        timeout=timedelta(seconds=60), device_id=torch.device("tpu", 0) if suite == "groups" else None,
    )  # fmt: skip
    said: dict[str, str] = {}
    for name, run in PROGRAMS[suite].items():
        try:
            run("tpu")
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
            break  # the ranks are out of step
    print(json.dumps(said), flush=True)
    os._exit(0)  # a group that has lost a rank waits for it


if __name__ == "__main__":
    assert tempfile.gettempdir()
    main()
