"""How many regions a step of training takes: what DDP and FSDP2 do between the layers is fused with them.

In plain torch there are none, and a program that counts too many says so itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fused_eager import current_mode
from fused_eager.log.events import LOG

from . import RANK, WORLD, program, waves

LAYERS, WIDTH = 5, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(nn.functional.gelu(self.up(self.last(x))))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def counted(model: nn.Module, d: str, most: int) -> Any:
    """Train; the last step, without the reading of its loss, is to take no more than so many regions, and no islands
    but collectives and copies around them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        x = waves(d, 2, 8, WIDTH, shift=step + RANK)
        LOG.clear()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flushes = LOG.of("flush")
    regions = sum(e.data["regions"] for e in flushes)
    why = [(e.data["ops"], e.data["regions"], e.data["reason"], e.data["detail"]) for e in flushes]
    assert regions <= most, (regions, why)
    islands = {e.data["op"] for e in LOG.of("island") if not e.data["op"].startswith(("c10d.", "fsdp."))}
    assert not islands, islands
    return torch.tensor(losses)


@program("regions")
def sharded(d: str) -> Any:
    """A region for each collective, one for what runs meanwhile in the forward pass, and one for the optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = blocks().to(d), init_device_mesh(d, (WORLD,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return counted(model, d, 4 * LAYERS + 1)


@program("regions")
def in_buckets(d: str) -> Any:
    """A region for each bucket, and one for the optimizer."""
    model = nn.parallel.DistributedDataParallel(blocks().to(d), bucket_cap_mb=0.015)
    buckets = 6
    return counted(model, d, buckets + 1 + LAYERS * (d == "cpu"))


@program("regions")
def in_buckets_of_a_static_graph(d: str) -> Any:
    model = nn.parallel.DistributedDataParallel(blocks().to(d), bucket_cap_mb=0.015, static_graph=True)
    return counted(model, d, 6 + 1 + LAYERS * (d == "cpu"))


@program("regions")
def what_is_not_read_runs_meanwhile(d: str) -> Any:
    """In a region of its own, behind the one that the collective waits for."""
    found = []
    for turn in range(3):
        total, other = waves(d, 6, shift=RANK), waves(d, 8, 8, shift=turn)
        LOG.clear()
        for _ in range(6):
            other = (other @ other).tanh()
        dist.all_reduce(total.mul_(2))
        flushes = [e.data for e in LOG.of("flush") if e.data["reason"] == "sync.collective"]
        plain = d == "cpu" and current_mode() == "off"
        assert plain or [f["regions"] for f in flushes] == [2], flushes
        found += [total, other]
    return found


@program("regions")
def no_more_than_two_layers_are_whole(d: str) -> Any:
    """What FSDP2 promises of memory: beside the shards, the parameters of the layer that is computed and the next."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers, wide = 12, 256
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(wide, wide, bias=False) for _ in range(layers)]).to(d)
    mesh = init_device_mesh(d, (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    held = [p for layer in model for p in layer._get_fsdp_state()._fsdp_param_group.fsdp_params]  # type: ignore[operator, union-attr, attr-defined]
    whole: list[int] = []

    def look(*_: Any) -> None:
        """How many layers have their parameters as a whole."""
        of = [getattr(p, "_unsharded_param", None) for p in held]
        whole.append(sum(t is not None and t.untyped_storage().size() > 0 for t in of))

    for layer in model:
        layer.register_forward_hook(look)
        layer.weight.register_post_accumulate_grad_hook(look)
    losses, most = [], {}
    for step in range(8):
        is_kept = step < 4  # the shards' gradients stay where they are, or are made anew
        before = 0
        if d != "cpu":
            torch.tpu.synchronize()  # type: ignore[attr-defined]
            torch.tpu.reset_peak_memory_stats()  # type: ignore[attr-defined]
            before = torch.tpu.memory_allocated()  # type: ignore[attr-defined]
        loss = model(waves(d, 4, wide, shift=step + RANK)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if d != "cpu":
            most[is_kept] = torch.tpu.max_memory_allocated() - before  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=not is_kept)
    assert whole and max(whole) <= 2, max(whole)
    # One of these, what is gathered for the next, a gradient with its copy, the copy before, and what comes of one.
    for is_kept, taken in most.items():
        assert taken < (7 + (0 if is_kept else layers / WORLD)) * 4 * wide * wide, (is_kept, taken / (4 * wide * wide))
    return torch.tensor(losses)
