"""Training on several ranks: DDP, FSDP2, DTensor."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import RANK, WORLD, numbers, program


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
def data_parallel_with_a_static_graph(d: str) -> Any:
    model = nn.parallel.DistributedDataParallel(net().to(d), static_graph=True, bucket_cap_mb=1e-3)
    return torch.tensor(trained(model, model.parameters(), d)), [p.detach() for p in model.parameters()]


@program("training")
def ranks_on_different_devices(d: str) -> Any:
    """Every other rank trains on CPU tensors: the gradients meet in one group. (Not where XLA is who adds them up.)"""
    is_on_device = RANK % 2 or os.environ.get("FUSED_EAGER_COLLECTIVES", "host") != "host"
    return data_parallel(d if is_on_device else "cpu")


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
    loss = model(torch.full((2, 8), float(RANK + 1), device=d)).square().mean()
    try:
        loss.backward()
    except RuntimeError as error:
        assert dist.get_backend() == "gloo" and "Cannot use ReduceOp.PREMUL_SUM with Gloo" in str(error), error
        return []
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


@program("training")
def sharded_tensors(d: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(d, (WORLD,))
    a = distribute_tensor(numbers(d, 4, 4), mesh, [Shard(0)])
    b = (a @ a.redistribute(mesh, [Replicate()])).sin()
    return b.full_tensor(), a.redistribute(mesh, [Shard(1)]).to_local()
