"""Whole programs of several ranks, in which many of torch's ways meet in one step."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import RANK, WORLD, numbers, program, room, waves
from .training import net
from .wider import Words, cross_entropy, fit, mesh_of, sharded, text, whole, words


@program("further")
def two_losses_of_one_model(d: str) -> Any:
    """One backward pass for each, the first without an exchange; then both in one pass."""
    torch.manual_seed(0)
    body, first, second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = body, first, second

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.body(x).tanh()
            return self.first(h), self.second(h)

    model = nn.parallel.DistributedDataParallel(Both().to(d), bucket_cap_mb=1e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(4):
        x = waves(d, 6, 8, shift=step + RANK)
        a, b = model(x)
        classes = nn.functional.cross_entropy(a, (torch.arange(6) % 4).to(d))
        value = nn.functional.smooth_l1_loss(b.squeeze(1), x.mean(1))
        if step % 2:
            # torch lets one of the passes exchange gradients
            with model.no_sync():
                a2, b2 = model(x * 0.5)
                (nn.functional.mse_loss(a2, a.detach()) + b2.square().mean()).backward()
            a, b = model(x)
            classes = nn.functional.cross_entropy(a, (torch.arange(6) % 4).to(d))
        (classes + 0.5 * value if step % 2 == 0 else classes + b.sum() * 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step < 2)
        losses += [torch.tensor(classes.item()), value.detach()]
    return losses, whole(model.parameters())


@program("further")
def two_models_against_each_other(d: str) -> Any:
    """Of which each is trained through the other, with gradients of gradients."""
    torch.manual_seed(0)
    make = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(d))
    judge = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(d))
    of_make = torch.optim.Adam(make.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-3)
    of_judge = torch.optim.RMSprop(judge.parameters(), lr=1e-3, eps=1e-3)
    losses: list[Any] = []
    for step in range(3):
        real = waves(d, 5, 8, shift=step + RANK)
        made = make(waves(d, 5, 4, shift=2.0 * step + RANK))
        loss = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(made.detach())).mean()
        between = (0.3 * real + 0.7 * made.detach()).requires_grad_()
        slope = torch.autograd.grad(judge.module(between).sum(), between, create_graph=True)[0]
        (loss + 0.1 * (slope.norm(dim=1) - 1).square().mean()).backward()
        of_judge.step()
        of_judge.zero_grad()
        for p in judge.parameters():
            p.requires_grad_(False)
        against = nn.functional.softplus(-judge.module(made)).mean()
        against.backward()
        for p in judge.parameters():
            p.requires_grad_(True)
        of_make.step()
        of_make.zero_grad()
        losses += [loss.detach(), against.detach(), slope.detach()]
    return losses, whole(make.parameters()), whole(judge.parameters())


@program("further")
def gradients_added_up_and_clipped_in_shards(d: str) -> Any:
    """FSDP2: the exchange only for the last of three batches, clipping by the norm of sharded gradients."""
    model = sharded(words(d), d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    said: list[Any] = []
    for step in range(2):
        for part in range(3):
            last = part == 2
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            x, y = text(d, 3 * step + part)
            loss = cross_entropy(model(x), y) / 3
            loss.backward()
        norm: Any = nn.utils.get_total_norm([p.grad for p in model.parameters()], error_if_nonfinite=True)
        norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
        optimizer.step()
        optimizer.zero_grad()
        said += [torch.tensor(loss.item()), norm]
    return said, whole(model.parameters())


@program("further")
def a_branch_that_one_rank_skips(d: str) -> Any:
    """By what it reads from its data; the others' gradients count for its parameters."""
    torch.manual_seed(0)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.extra, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.stem(x).relu()
            if x[0, 0].item() > 0:
                h = h + self.extra(h)
            return self.head(h)  # type: ignore[no-any-return]

    model = nn.parallel.DistributedDataParallel(
        Branches().to(d), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, unused = [], []
    for step in range(6):
        loss = model(waves(d, 3, 8, shift=1.5 * step + 2 * RANK)).square().mean()
        loss.backward()
        unused.append([p.grad is None or not bool(p.grad.any()) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, unused, whole(model.parameters())


@program("further")
def words_in_rows_and_a_sharded_loss(d: str) -> Any:
    """An embedding of which each rank has some rows, a head of which it has some columns, the loss over both."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Tanh(), nn.Linear(8, 30)).to(d)
    mesh = mesh_of(d, names=("tp",))
    parallelize_module(model, mesh, {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(3):
        ids = ((torch.arange(24) * (5 + step)) % 30).view(3, 8).to(d)
        wanted = ids.roll(-1, 1).clone()
        wanted[:, -1] = -100
        with loss_parallel():
            out = model(ids)
            assert isinstance(out, DTensor)
            loss = nn.functional.cross_entropy(out.flatten(0, 1), wanted.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return whole(losses), whole(model.parameters())


@program("further")
def experts_of_whom_some_have_no_work(d: str) -> Any:
    """Unequal parts, and none: in the first step all go to rank 0, in the second nobody sends anything."""
    torch.manual_seed(0)
    expert = nn.Linear(4, 4).to(d)
    found: list[Any] = []
    for step in range(4):
        x = waves(d, 7, 4, shift=step + RANK).requires_grad_()
        if step == 0:
            sent = [7] + [0] * (WORLD - 1)
        elif step == 1:
            sent = [0] * WORLD
        else:
            sent = [(RANK + step + k) % 3 if k != RANK else 0 for k in range(WORLD)]
        counts = torch.tensor(sent).to(d)
        received = torch.zeros_like(counts)
        dist.all_to_all_single(received, counts)
        there = received.tolist()
        mine = room(d, sum(there), 4)
        dist.all_to_all_single(mine, x.detach()[: sum(sent)], there, sent)
        out = expert(mine).relu()
        back = room(d, sum(sent), 4)
        dist.all_to_all_single(back, out.detach().contiguous(), sent, there)
        expert.zero_grad()
        (out.square().sum() + 0.5).backward()
        for p in expert.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.data -= 0.1 * p.grad  # type: ignore[operator]
        found += [there, back, received]
    return found, whole(expert.parameters())


@program("further")
def borders_of_an_image(d: str) -> Any:
    """Each rank has some rows; neighbours exchange their borders, and gradients go the same way back."""

    def exchange(up: torch.Tensor | None, down: torch.Tensor | None, like: torch.Tensor) -> list[torch.Tensor]:
        above, below = torch.zeros_like(like), torch.zeros_like(like)
        ops = []
        if RANK > 0:
            assert up is not None
            ops += [dist.P2POp(dist.isend, up, RANK - 1), dist.P2POp(dist.irecv, above, RANK - 1)]
        if RANK < WORLD - 1:
            assert down is not None
            ops += [dist.P2POp(dist.isend, down, RANK + 1), dist.P2POp(dist.irecv, below, RANK + 1)]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return [above, below]

    class Borders(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            above, below = exchange(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous(), x[:, :, :1])
            return torch.cat([above, x, below], 2)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            above, below = exchange(grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous(), grad[:, :, :1])
            mine = grad[:, :, 1:-1].clone()
            mine[:, :, :1] += above
            mine[:, :, -1:] += below
            return mine

    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=(0, 1)) for _ in range(2)]).to(d)
    x = waves(d, 1, 2, 3, 5, shift=RANK).requires_grad_()
    h = x
    for layer in layers:
        h = layer(Borders.apply(h)).tanh()
    h.square().sum().backward()
    for p in layers.parameters():
        dist.all_reduce(p.grad)
    return h.detach(), x.grad, [p.grad for p in layers.parameters()]


@program("further")
def objects_within_objects(d: str) -> Any:
    """Every object collective, with tensors in dicts in lists, parts of tensors, parameters, and what is pending."""
    x = numbers(d, 4, 3)
    mine = {"all": [x * 2, (x[1], x.t()[:2])], "of": {"rank": RANK, "p": nn.Parameter(x + 1)}, "none": None}
    gathered: list[Any] | None = [None] * WORLD if RANK == WORLD - 1 else None
    dist.gather_object(mine, gathered, dst=WORLD - 1)
    given: list[Any] = [{"to": k, "w": (x + k).sin()} for k in range(WORLD)] if RANK == 0 else [None] * WORLD
    part: list[Any] = [None]
    dist.scatter_object_list(part, given, src=0)
    sent = [[x.cumsum(0), "words"], {"n": 3 + RANK}] if RANK == 1 else [None, None]
    dist.broadcast_object_list(sent, 1)
    box: list[Any] = [None]
    if RANK == 0:
        dist.send_object_list([{"y": x.exp(), "e": torch.empty(0, 3, device=d)}], 1)
    elif RANK == 1:
        dist.recv_object_list(box, 0)
    found: list[Any] = [part[0]["to"], part[0]["w"], sent[0][0], sent[0][1], sent[1]["n"]]  # type: ignore[index]
    if gathered is not None:
        found += [[g["all"][0], *g["all"][1], g["of"]["rank"], g["of"]["p"].detach()] for g in gathered]
    if RANK == 1:
        found += [box[0]["y"], box[0]["e"]]
    return found


@program("further")
def batches_by_workers(d: str) -> Any:
    """A loader with processes of its own that stay, forked while the ranks compute."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(waves("cpu", 22, 8), torch.arange(22) % 4)
    sampler: Any = DistributedSampler(data, WORLD, RANK, shuffle=True, drop_last=True, seed=3)
    model = nn.parallel.DistributedDataParallel(net().to(d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, 3, sampler=sampler, num_workers=1, persistent_workers=True, prefetch_factor=2)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(d, non_blocking=True)), y.to(d, non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return losses, total, whole(model.parameters())


@program("further")
def an_average_of_shards(d: str) -> Any:
    """The mean of a sharded model over time: kept in shards, put in its place for an evaluation, and taken back."""
    model = sharded(words(d), d)
    mean = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    said: list[Any] = []
    for step in range(3):
        said.append(fit(model, d, 1, optimizer=optimizer)[0][0])
        with torch.no_grad():
            if step % 2:
                for m, p in zip(mean, model.parameters(), strict=True):
                    m.lerp_(p.detach(), 0.2)
            else:
                torch._foreach_lerp_(mean, [p.detach() for p in model.parameters()], 0.2)
            kept = [p.detach().clone() for p in model.parameters()]
            for p, m in zip(model.parameters(), mean, strict=True):
                p.copy_(m)
            x, y = text(d, 9)
            said.append(torch.tensor(cross_entropy(model(x), y).item()))
            model.reshard()  # the outermost part is left whole
            for p, k in zip(model.parameters(), kept, strict=True):
                p.copy_(k)
    return said, whole(model.parameters()), whole(mean)


@program("further")
def optimizer_in_uneven_parts(d: str) -> Any:
    """ZeRO of parameters that do not divide, in buckets, with groups, a schedule, and its state put together."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.Linear(5, 1, bias=False)).to(d)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)  # type: ignore[assignment]
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.05}]  # fmt: skip
    optimizer = ZeroRedundancyOptimizer(
        groups, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-2, eps=1e-3
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in range(4):
        loss = model(waves(d, 4, 7, shift=step + RANK)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    optimizer.consolidate_state_dict(to=0)
    state = [sorted(optimizer.state_dict()["state"])] if RANK == 0 else []
    moments = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()] if RANK == 0 else []
    return losses, state, [m.cpu() for m in moments], whole(model.parameters())


@program("further")
def saved_while_it_goes_on(d: str) -> Any:
    """Model and optimizer, twice; what is saved is what was there when it was asked for, whatever is written since."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = [tempfile.mkdtemp(prefix="further-") if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    model = sharded(words(d), d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    group = dist.new_group(backend="gloo")
    at: list[Any] = []
    saving: Any = None
    for step in range(3):
        fit(model, d, 1, optimizer=optimizer)
        if saving is not None:
            saving.result()
        if step < 2:
            state, of_optimizer = get_state_dict(model, optimizer)
            given = {"model": state, "optimizer": of_optimizer, "step": torch.tensor(step)}
            saving = dcp.async_save(given, checkpoint_id=f"{folder[0]}/{step}", process_group=group)
            at.append([t.clone() for t in whole(model.parameters())])
    dist.barrier()
    found = []
    for step in range(2):
        other = sharded(Words().to(d), d)
        of_other = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3)
        state, of_optimizer = get_state_dict(other, of_other)
        given = {"model": state, "optimizer": of_optimizer, "step": torch.tensor(-1)}
        dcp.load(given, checkpoint_id=f"{folder[0]}/{step}")
        set_state_dict(other, of_other, model_state_dict=state, optim_state_dict=of_optimizer)
        same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(whole(other.parameters()), at[step], strict=True))
        found += [same, int(given["step"]), fit(other, d, 1, optimizer=of_other)]
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(str(folder[0]))
    assert found[0] and found[3], "what was saved is not what there was"
    return at, found, whole(model.parameters())


@program("further")
def groups_in_other_orders(d: str) -> Any:
    """Collectives of three groups, which each rank starts in an order of its own, and waits for in another. (XLA, as
    NCCL, wants one order on all ranks.)"""
    differs = RANK if os.environ.get("FUSED_EAGER_COLLECTIVES", "host") == "host" else 0
    groups = [dist.new_group() for _ in range(3)]
    x = [numbers(d, 50 + k) for k in range(3)]
    found: list[Any] = []
    for turn in range(4):
        order = [(k + differs * (turn + 1)) % 3 for k in range(3)]
        works: dict[int, Any] = {}
        for k in order:
            works[k] = dist.all_reduce(x[k], op=dist.ReduceOp.MAX, group=groups[k], async_op=True)
        y = waves(d, 8, 8, shift=turn) @ waves(d, 8, 8)
        for k in reversed(order):
            works[k].wait()
            x[k] += 0.5
        found += [y, *[t.clone() for t in x]]
        x = [t / 2 + RANK for t in x]
    # Some ranks call more in a group of their own than others do in theirs.
    pairs = [dist.new_group([r, r + 1]) for r in range(0, WORLD, 2)]
    mine, z = pairs[RANK // 2], numbers(d, 3)
    for _ in range(1 + RANK // 2):
        dist.all_reduce(z, group=mine)
        z = z * 0.5
    dist.all_reduce(z)
    return found, z


@program("further")
def replicas_by_hand(d: str) -> Any:
    """Hooks that start an exchange as soon as a gradient is there, many gradients as one, rank 0's words first."""
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 2)).to(d)
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.data, 0)
    works: list[Any] = []
    late: list[torch.Tensor] = []

    def started(p: torch.Tensor) -> None:
        assert p.grad is not None
        if p.ndim == 1:
            late.append(p.grad)
            return
        p.grad.div_(WORLD)
        works.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(started)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(3):
        loss = model(waves(d, 5, 8, shift=step + RANK)).square().mean()
        loss.backward()
        flat = torch._utils._flatten_dense_tensors(late)
        dist.all_reduce(flat)
        flat /= WORLD
        for g, part in zip(late, torch._utils._unflatten_dense_tensors(flat, late), strict=True):
            g.copy_(part)
        for work in works:
            work.wait()
        works.clear()
        late.clear()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [room(d, len(vector)) for _ in range(WORLD)]
    dist.all_gather(everyones, vector)
    assert all(torch.equal(v.cpu(), everyones[0].cpu()) for v in everyones)
    return losses, vector


@program("further")
def far_apart_with_an_outer_optimizer(d: str) -> Any:
    """DiLoCo: many steps by themselves, then one of momentum over the mean of what has changed, sent in bfloat16."""
    model = net().to(d)
    outer = copy.deepcopy(model)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    slow = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    losses = []
    for round_ in range(3):
        for step in range(3):
            loss = model(waves(d, 6, 8, shift=3 * round_ + step + 2 * RANK)).square().mean()
            loss.backward()
            inner.step()
            inner.zero_grad()
        losses.append(torch.tensor(loss.item()))
        works = []
        for o, p in zip(outer.parameters(), model.parameters(), strict=True):
            change = ((o.data - p.data) * 256).round().to(torch.int32)
            works.append((o, change, dist.all_reduce(change, async_op=True)))
        for o, change, work in works:
            work.wait()
            o.grad = change.float() / (256 * WORLD)
        slow.step()
        with torch.no_grad():
            for p, o in zip(model.parameters(), outer.parameters(), strict=True):
                p.copy_(o)
    return losses, whole(outer.parameters())


@program("further")
def written_word_by_word_in_shards(d: str) -> Any:
    """A method of a sharded model's own that calls it many times, one word longer each time, in inference mode."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    class Writer(Words):
        def write(self, ids: torch.Tensor, more: int) -> torch.Tensor:
            for _ in range(more):
                ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
            return ids

    torch.manual_seed(0)
    model = sharded(Writer().to(d), d, reshard_after_forward=True)
    register_fsdp_forward_method(model, "write")
    before, _ = fit(model, d, 1)
    with torch.inference_mode():
        ids = model.write(text(d, 0)[0][:2, :3], 5)
    after, found = fit(model, d, 1)
    return before, ids.clone(), after, found


@program("further")
def shards_of_many_layouts(d: str) -> Any:
    """Uneven shards that are cut, joined, summed and turned, from one layout to another, with their gradients."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(d)
    leaf = waves(d, 5, 6, 3).requires_grad_()
    x = distribute_tensor(leaf, mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)])
    z: Any = (y.sum(2) * 2).redistribute(mesh, [Shard(0)])
    w: Any = torch.einsum("ij,kj->ik", z, z.redistribute(mesh, [Replicate()]))
    local = w.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    parts = torch.cat([local, local.t() * (RANK + 1)])
    again: Any = DTensor.from_local(parts, mesh, [Partial("avg")]).redistribute(mesh, [Replicate()])
    loss = again.to_local().square().mean()
    loss.backward()
    masked = x.detach().redistribute(mesh, [Replicate()])
    chosen = torch.where(masked > 0, masked, 0.0).cumsum(1)
    few: Any = distribute_tensor(waves(d, 2, 3), mesh, [Shard(0)])  # some ranks have none
    return [loss.detach(), leaf.grad, chosen.full_tensor(), (few * 2).full_tensor(), few.sum().full_tensor(),
            few.std().full_tensor() if hasattr(few.std(), "full_tensor") else few.std()]  # type: ignore[attr-defined]  # fmt: skip
