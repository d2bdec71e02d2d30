"""Other ways to train on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from . import RANK, WORLD, program, waves
from .training import net


@program("parallel")
def tensor_parallel(d: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net().to(d)
    parallelize_module(model, init_device_mesh(d, (WORLD,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # Not all parameters are sharded, and torch refuses to update both kinds in one call.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        model(waves(d, 6, 8, shift=step)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


@program("parallel")
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


@program("parallel")
def optimizer_in_parts(d: str) -> Any:
    """ZeRO, stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net().to(d))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(waves(d, 6, 8, shift=step + RANK)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@program("parallel")
def local_steps(d: str) -> Any:
    """Local SGD: each rank by itself, and now and then the mean."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = net().to(d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    for step in range(4):
        optimizer.zero_grad()
        model(waves(d, 6, 8, shift=step + RANK)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return [p.detach() for p in model.parameters()]


@program("parallel")
def ranks_with_more_batches(d: str) -> Any:
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(net().to(d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + RANK):
            optimizer.zero_grad()
            model(waves(d, 6, 8, shift=step + RANK)).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@program("parallel")
def ranks_with_more_batches_that_average_over_those_that_are_left(d: str) -> Any:
    """C++ waits for how many these are, and asks for the result of what it has waited for."""
    model = nn.parallel.DistributedDataParallel(net().to(d), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 - RANK):
            optimizer.zero_grad()
            model(waves(d, 6, 8, shift=step + RANK)).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@program("parallel")
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


@program("parallel")
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


@program("parallel")
def one_forward_one_backward(d: str) -> Any:
    """A pipeline whose stages begin with the gradients before the last batch is in."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    return pipelined(d, 1, PipelineStage, Schedule1F1B)


@program("parallel")
def interleaved_stages(d: str) -> Any:
    """A pipeline in which each rank has two stages that do not follow each other."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    return pipelined(d, 2, PipelineStage, ScheduleInterleaved1F1B)


def pipelined(d: str, each: int, kind: Any, schedule: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(WORLD * each)]
    at = [RANK + WORLD * k for k in range(each)]
    mine = [layers[i].to(d) for i in at]
    stages = [kind(module, i, len(layers), torch.device(d)) for module, i in zip(mine, at, strict=True)]
    run = schedule(
        stages if each > 1 else stages[0],
        n_microbatches=2 * WORLD,
        loss_fn=lambda out, y: (out - y).square().mean(),
    )
    optimizer = torch.optim.SGD([p for module in mine for p in module.parameters()], lr=0.1)
    losses: list[torch.Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = (waves(d, 4 * WORLD, 8, shift=step + k) for k in range(2))
        found: list[torch.Tensor] = []
        if RANK == 0:
            run.step(x)
        elif RANK == WORLD - 1:
            run.step(target=y, losses=found)
        else:
            run.step()
        losses += [torch.stack(found).mean().detach()] if found else []
        optimizer.step()
    return losses, [p.detach() for module in mine for p in module.parameters()]


@program("parallel")
def batches_normed_together(d: str) -> Any:
    """SyncBatchNorm, which torch has for accelerators: on the CPU, each rank computes with the batches of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(d)
    if d != "cpu":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = waves(d, 5 * WORLD, 8, shift=step)
        out = model(x if d == "cpu" else x.chunk(WORLD)[RANK])
        out.square().mean().backward()
        optimizer.step()
    named = {name.removeprefix("module."): t.detach() for name, t in model.state_dict().items()}
    return [named[name] for name in sorted(named) if not name.endswith("tracked")]


@program("parallel")
def gradients_in_half_their_bits(d: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return hooked(d, lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook), rounds=True)


@program("parallel")
def gradients_in_half_their_bits_by_the_built_in_hook(d: str) -> Any:
    kind = dist.BuiltinCommHookType.FP16_COMPRESS
    return hooked(d, lambda model: model._register_builtin_comm_hook(kind), rounds=True)


@program("parallel")
def gradients_of_low_rank(d: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    # One bucket: what follows a collective here is called by gloo's threads, in any order.
    return hooked(d, lambda model: model.register_comm_hook(state, powerSGD_hook.powerSGD_hook), megabytes=25)


@program("parallel")
def local_steps_after_a_few(d: str) -> Any:
    """Post-local SGD: gradients are averaged at first, and within a smaller group later."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook

    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
    return hooked(d, lambda model: model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook))


def hooked(d: str, hook: Any, rounds: bool = False, megabytes: float = 1e-3) -> Any:
    """Train with a hook for the gradients' communication; `rounds`: whether it does to 10 bits, in any order."""
    model = nn.parallel.DistributedDataParallel(net().to(d), bucket_cap_mb=megabytes)
    hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(waves(d, 6, 8, shift=step + RANK)).square().mean().backward()
        optimizer.step()
    return [p.detach() * (1e-3 if rounds else 1) for p in model.parameters()]


@program("parallel")
def sharded_by_the_older_way(d: str) -> Any:
    """FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    found = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(net().to(d), sharding_strategy=strategy, device_id=torch.device(d))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(waves(d, 6, 8, shift=step + RANK)).square().mean()
            loss.backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model):
            found += [loss.detach(), *[p.detach().clone() for p in model.parameters()]]
    return found


def sharded(d: str, mesh: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = net().to(d)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[no-any-return]


def in_steps(model: nn.Module, d: str, steps: int = 3, parts: int = 1) -> Any:
    """Train a sharded model; the gradients of `parts` batches are added up before they are reduced."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            if parts > 1:
                model.set_requires_gradient_sync(part == parts - 1)  # type: ignore[operator]
            loss = model(waves(d, 6, 8, shift=step + RANK + part)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


@program("parallel")
def sharded_in_every_form(d: str) -> Any:
    """FSDP2: kept whole after the forward pass, gradients added up, parts of the mesh, prefetched by hand."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(d, (WORLD,))
    found = [in_steps(sharded(d, mesh, reshard_after_forward=False), d), in_steps(sharded(d, mesh), d, parts=3)]
    model = sharded(d, mesh)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]  # type: ignore[attr-defined]
    for one, after in zip(layers, layers[1:], strict=False):
        one.set_modules_to_forward_prefetch([after])  # type: ignore[operator]
        after.set_modules_to_backward_prefetch([one])  # type: ignore[operator]
    return [*found, in_steps(model, d)]


@program("parallel")
def sharded_in_another_dtype(d: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(d, init_device_mesh(d, (WORLD,)), mp_policy=policy)
    # Rounded to 8 bits on the way, in another order at each door.
    return [t * 1e-3 for part in in_steps(model, d, 2) for t in part]


@program("parallel")
def sharded_and_replicated(d: str) -> Any:
    """HSDP, on a mesh of two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    return in_steps(sharded(d, init_device_mesh(d, (2, WORLD // 2), mesh_dim_names=("copies", "shards"))), d)


@program("parallel")
def sharded_and_parallel(d: str) -> Any:
    """Tensor parallel within FSDP2, on a mesh of two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(d, (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)).to(d)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(waves(d, 6, 8, shift=step + RANK // 2)).square().mean()
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses += [loss.detach(), total.full_tensor()]  # type: ignore[attr-defined]
        optimizer.step()
    return losses, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


@program("parallel")
def attention_in_a_ring(d: str) -> Any:
    """Context parallel: each rank has a part of the sequence, and keys and values go round."""

    class Round(torch.autograd.Function):
        """Send to the next rank what the one before has sent; gradients go the other way."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, by: int) -> torch.Tensor:
            ctx.by = by
            got = torch.empty_like(x)
            ops = [
                dist.P2POp(dist.isend, x.contiguous(), (RANK + by) % WORLD),
                dist.P2POp(dist.irecv, got, (RANK - by) % WORLD),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return got

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return Round.apply(grad, -ctx.by), None

    q, k, v = (waves(d, 2, 4, 8, shift=RANK + i).requires_grad_() for i in range(3))
    kv, total, weight = torch.stack([k, v]), torch.zeros_like(q), torch.zeros(2, 4, 1, device=d)
    for turn in range(WORLD):
        scores = (q @ kv[0].transpose(-1, -2) / 8**0.5).exp()
        total, weight = total + scores @ kv[1], weight + scores.sum(-1, keepdim=True)
        if turn < WORLD - 1:
            kv = Round.apply(kv, 1)
    out = total / weight
    out.square().sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


@program("parallel")
def sequences_for_heads(d: str) -> Any:
    """Context parallel in another way: parts of the sequence are exchanged for parts of the heads, and back."""
    group = dist.group.WORLD
    assert group is not None
    sizes = [1] * WORLD

    def swap(t: torch.Tensor) -> torch.Tensor:
        return functional.all_to_all_single_autograd(t.contiguous(), sizes, sizes, group)

    tokens, heads, width = 4, WORLD, 8
    q, k, v = (waves(d, heads, tokens, width, shift=RANK + i).requires_grad_() for i in range(3))
    # A head of each rank's own, of the whole sequence.
    mine = [swap(t).reshape(1, WORLD * tokens, width) for t in (q, k, v)]
    out = nn.functional.scaled_dot_product_attention(*mine)
    back = swap(out.reshape(WORLD, tokens, width))
    back.square().sum().backward()
    return back.detach(), q.grad, k.grad, v.grad
