"""A program for `--ranks-in-process`: collectives inside XLA, and what XLA has not, on four ranks. Each rank asserts
what it gets, and says so at the end."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fused_eager.frontends.collectives import across

across.ON_SIMULATED = True  # as where the devices are chips
dist.init_process_group("fused_eager")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
OP = dist.ReduceOp
NAN, INF = float("nan"), float("inf")


def reduced(given: torch.Tensor, op: object = OP.SUM) -> list[object]:
    given = given.to("tpu")
    dist.all_reduce(given, op=op)
    found: list[object] = given.cpu().tolist()
    return found


def same(found: object, expected: object) -> None:
    assert repr(found) == repr(expected), f"rank {RANK}: {found} instead of {expected}"


SUM = float(sum(range(WORLD)))
same(reduced(torch.full((2,), float(RANK))), [SUM, SUM])
same(reduced(torch.tensor(float(RANK))), SUM)
same(reduced(torch.empty(0, 3)), [])
same(reduced(torch.tensor([NAN if RANK == 1 else 1.0, RANK, INF, -0.0]), OP.MAX), [NAN, WORLD - 1.0, INF, -0.0])
same(reduced(torch.tensor([NAN if RANK == 1 else 1.0, RANK], dtype=torch.bfloat16), OP.MIN), [NAN, 0.0])
same(reduced(torch.full((2,), 60000.0, dtype=torch.float16), OP.AVG), [60000.0, 60000.0])  # the sum overflows
same(reduced(torch.tensor([RANK]), OP.BXOR), [0 ^ 1 ^ 2 ^ 3])
same(reduced(torch.tensor([True, RANK == 0]), OP.MIN), [True, False])
same(reduced(torch.full((1,), 1 + 1j * RANK)), [complex(WORLD, SUM)])
same(reduced(torch.full((2,), 2.0), dist._make_nccl_premul_sum(RANK + 1.0)), [2 * (SUM + WORLD)] * 2)

part = torch.zeros(2, 3, device="tpu")
dist.all_reduce(part[:, 1:].fill_(RANK))
same(part.tolist(), [[0.0, SUM, SUM]] * 2)
seen = torch.ones(3, device="tpu")
work = dist.all_reduce(seen, async_op=True)
other = seen.new_full((3,), 5.0)
work.wait()
same((seen + other).tolist(), [WORLD + 5.0] * 3)

sizes = list(range(1, WORLD + 1))
uneven = torch.empty(WORLD * (RANK + 1), device="tpu")
dist.all_to_all_single(uneven, torch.full((sum(sizes),), float(RANK), device="tpu"), [RANK + 1] * WORLD, sizes)
same(uneven.tolist(), [float(r) for r in range(WORLD) for _ in range(RANK + 1)])
eighths = [torch.empty(2, device="tpu", dtype=torch.float8_e4m3fn) for _ in range(WORLD)]
dist.all_gather(eighths, torch.full((2,), RANK + 0.5, device="tpu").to(torch.float8_e4m3fn))
same([t.float().tolist() for t in eighths], [[r + 0.5] * 2 for r in range(WORLD)])
mixed = torch.ones(2) if RANK == 0 else torch.ones(2, device="tpu")
dist.all_reduce(mixed)
same(mixed.tolist(), [float(WORLD)] * 2)
after = (RANK + 1) % WORLD
ring = torch.full((2,), float(RANK), device="tpu")
if RANK == 0:
    dist.send(ring, after)
dist.recv(ring, (RANK - 1) % WORLD)
if RANK:
    dist.send(ring, after)
same(ring.tolist(), [0.0, 0.0])
print(f"rank {RANK} has all")
