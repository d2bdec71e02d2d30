"""Training loops as people write them, with what torch offers beside the plain forms in `training` and `parallel`."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import RANK, WORLD, program, waves
from .training import net


class Block(nn.Module):
    """A transformer's, as one writes it for tensor parallel: the projections of q, k and v by themselves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head_width = width // heads

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t = x.shape[:2]
        q, k, v = (w(x).view(b, t, -1, self.head_width).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Words(nn.Module):
    """A small language model; `tied`: the head is the embedding's weight."""

    def __init__(self, vocabulary: int = 32, width: int = 16, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def words(d: str, tied: bool = False) -> Words:
    torch.manual_seed(0)
    return Words(tied=tied).to(d)


def text(d: str, step: int, rank: int = RANK, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    ids = (torch.arange(4 * (size + 1)) * (7 + step) + 3 * rank).remainder(31).view(4, size + 1).to(d)
    return ids[:, :-1], ids[:, 1:]


def cross_entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


def whole(parameters: Any) -> list[torch.Tensor]:
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in parameters]


def mesh_of(d: str, *shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(d, shape or (WORLD,), mesh_dim_names=names)


def fit(model: nn.Module, d: str, steps: int = 3, clip: float = 0.0, optimizer: Any = None) -> Any:
    """Train a language model; the losses, and the parameters as a whole."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(steps):
        x, y = text(d, step)
        loss = cross_entropy(model(x).float(), y)
        loss.backward()
        if clip:
            losses.append(whole([nn.utils.clip_grad_norm_(model.parameters(), clip)])[0])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, whole(model.parameters())


def sharded(model: Any, d: str, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    options.setdefault("mesh", mesh_of(d))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@program("wider")
def replicas_of_a_language_model(d: str) -> Any:
    """Tied weights, gradients clipped and added up, a schedule for the rate, layers computed again."""
    from torch.utils.checkpoint import checkpoint

    model = words(d, tied=True)
    for layer in model.layers:
        layer.forward = (lambda f: lambda x: checkpoint(f, x, use_reentrant=False))(layer.forward)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=4)
    losses = []
    for step in range(3):
        for part in range(2):
            x, y = text(d, 2 * step + part)
            ddp.require_backward_grad_sync = part == 1
            loss = cross_entropy(ddp(x), y) / 2
            loss.backward()
        losses += [loss.detach(), nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses, whole(ddp.parameters())


@program("wider")
def replicas_in_half_types(d: str) -> Any:
    """Autocast and a scaler, buffers that are sent from rank 0, and an average of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).to(d)
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(3):
        with torch.autocast(d, dtype=torch.bfloat16):
            out = ddp(waves(d, 6, 8, shift=step + RANK))
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    found = [*model.state_dict().values(), *average.state_dict().values()]
    return [t.detach() * 1e-3 if t.is_floating_point() else t for t in found]  # 8 bits on the way


@program("wider")
def sharded_language_model(d: str) -> Any:
    return fit(sharded(words(d), d), d, clip=0.5)


@program("wider")
def sharded_and_kept_on_the_host(d: str) -> Any:
    """Parameters and the optimizer's state wait in the host's memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = sharded(words("cpu"), d, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return fit(model, d)


@program("wider")
def sharded_with_tied_weights_in_another_dtype(d: str) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    losses, found = fit(sharded(words(d, tied=True), d, mp_policy=policy), d, steps=2)
    # Outputs are about 12, where bfloat16 has steps of 0.06: both ways come equally far from what float32 comes to.
    return [t * 2e-5 for t in losses], [t * 1e-4 for t in found]


@program("wider")
def sharded_by_hand(d: str) -> Any:
    """Frozen layers, sizes that do not divide, another dimension, parameters that are left whole, asked for early."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 15), nn.Tanh(), nn.Linear(15, 3)).to(d)
    model[0].weight.requires_grad_(False)
    mesh = mesh_of(d)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else Shard(0))
    left = {model[4].bias}
    fully_shard(model, mesh=mesh, ignored_params=left)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    losses = []
    for step in range(3):
        handle = model[0].unshard(async_op=True)  # type: ignore[operator]
        handle.wait()
        loss = model(waves(d, 5, 7, shift=step + RANK)).square().mean()
        loss.backward()
        dist.all_reduce(model[4].bias.grad, op=dist.ReduceOp.SUM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, whole(model.parameters())


@program("wider")
def sharded_the_former_way(d: str) -> Any:
    """FSDP1 with its own clipping, and the parameters as a whole within a block."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        words("cpu"), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
        sync_module_states=d != "cpu",  # torch has it for accelerators
        device_id=torch.device(d, torch.tpu.current_device()) if d != "cpu" else torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(2):
        x, y = text(d, step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        losses += [loss.detach(), model.clip_grad_norm_(0.5)]
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        return losses, [p.detach().clone() for p in model.parameters()]


def parallel_words(d: str, mesh: Any) -> Any:
    """Tensor and sequence parallel of the whole model, the loss included."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    model = words(d)
    around = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    within = {
        "norm": SequenceParallel(),
        "norm2": SequenceParallel(),
        **{name: ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wk", "wv", "up")},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("wo", "down")},
    }
    parallelize_module(model, mesh, around)  # type: ignore[arg-type]
    for layer in model.layers:
        layer.head_width = 4
        parallelize_module(layer, mesh, within)  # type: ignore[arg-type]
        parallelize_module(
            layer, mesh, PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),),
                                            use_local_output=True),
        )  # fmt: skip
    return model


@program("wider")
def parallel_with_a_sharded_loss(d: str) -> Any:
    from torch.distributed.tensor.parallel import loss_parallel

    model = parallel_words(d, mesh_of(d, names=("tp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(3):
        x, y = text(d, step, rank=0)
        with loss_parallel():
            loss = cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return whole(losses), whole(model.parameters())


@program("wider")
def state_as_a_whole_and_back(d: str) -> Any:
    """The state of model and optimizer, gathered to rank 0 on the host; a new model has it from there, and goes on."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )  # fmt: skip

    model = sharded(words(d), d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    fit(model, d, 2, optimizer=optimizer)
    state, of_optimizer = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    sums = [float(t.sum()) for t in state.values()]  # on rank 0 alone
    assert all(t.device.type == "cpu" for t in state.values())
    other = sharded(Words().to(d), d)
    of_other = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=from_first)
    set_optimizer_state_dict(other, of_other, of_optimizer, options=from_first)
    return [round(s, 3) for s in sums], fit(other, d, 2, optimizer=of_other)


@program("wider")
def saved_in_the_background_and_loaded(d: str) -> Any:
    """`async_save` in a group of its own while the training goes on, loaded into a model that is sharded otherwise."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    folder = [tempfile.mkdtemp(prefix="wider-") if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    model = sharded(words(d), d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    fit(model, d, 2, optimizer=optimizer)
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0], process_group=group)
    after = fit(model, d, 1, optimizer=optimizer)
    saving.result()  # type: ignore[union-attr]
    dist.barrier()
    other = sharded(Words().to(d), d, reshard_after_forward=False)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state["model"])
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(str(folder[0]))
    return after, whole(other.parameters()), fit(other, d, 1)


@program("wider")
def optimizer_within_the_backward_pass(d: str) -> Any:
    """Each parameter is updated as soon as it has its gradient, and the gradient is freed."""
    model = sharded(words(d), d)
    of = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        of[p].step()  # type: ignore[index]
        of[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    losses = []
    for step in range(3):
        x, y = text(d, step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.detach())
    assert all(p.grad is None for p in model.parameters())
    return losses, whole(model.parameters())


@program("wider")
def batches_of_a_sampler(d: str) -> Any:
    """A loader with a sampler for ranks, metrics over all, one that says when to stop, and evaluation on one rank."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(waves("cpu", 37, 8), torch.arange(37) % 4)
    sampler: Any = DistributedSampler(data, WORLD, RANK, shuffle=True, seed=1)
    model = nn.parallel.DistributedDataParallel(net().to(d))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    said: list[Any] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        right, seen = torch.zeros((), device=d), torch.zeros((), device=d)
        for x, y in DataLoader(data, 4, sampler=sampler):
            x, y = x.to(d), y.to(d)
            out = model(x)
            nn.functional.cross_entropy(out, y, label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            right += (out.argmax(-1) == y).sum()
            seen += len(y)
        dist.all_reduce(right)
        dist.all_reduce(seen)
        said += [right.item(), seen.item()]
        if RANK == 0:
            best = copy.deepcopy(model.module)
            with torch.inference_mode():
                said.append(round(float(best(waves(d, 9, 8)).softmax(-1).amax()), 4))
        stop = torch.tensor([int(right > seen)], device=d)
        dist.broadcast(stop, 0)
        if stop:
            break
    return said, whole(model.parameters())
