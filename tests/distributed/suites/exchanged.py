"""What ranks exchange beside the plain collectives of `each`: as experts, rings, meshes and pipelines do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from . import RANK, WORLD, numbers, program, room, waves
from .training import net
from .wider import Words, cross_entropy, mesh_of, parallel_words, text, whole, words


@program("exchanged")
def experts_by_a_router(d: str) -> Any:
    """Tokens go where a router sends them: how many is in a tensor, which all exchange first."""
    torch.manual_seed(0)
    router, expert = nn.Linear(8, WORLD).to(d), nn.Linear(8, 8).to(d)
    group = dist.group.WORLD
    assert group is not None
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], lr=0.1)
    losses = []
    for step in range(3):
        x = waves(d, 12, 8, shift=step + RANK)
        weight, to = router(x).softmax(-1).max(-1)
        order = to.argsort(stable=True)
        sent = torch.bincount(to, minlength=WORLD)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, back = received.tolist(), sent.tolist()
        mine = functional.all_to_all_single_autograd(x[order], there, back, group)
        out = functional.all_to_all_single_autograd(expert(mine).relu(), back, there, group)
        found = torch.empty_like(out).index_copy(0, order, out) * weight[:, None]
        loss = (found - x).square().mean()
        loss.backward()
        for p in router.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, whole(router.parameters()), whole(expert.parameters()), received


@program("exchanged")
def round_a_ring(d: str) -> Any:
    """All-reduce by hand: parts go round, added up on the way, and then whole."""
    parts = list(numbers(d, WORLD * 3).chunk(WORLD))
    after, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    for phase in range(2):
        for turn in range(WORLD - 1):
            at = (RANK - turn + phase) % WORLD
            got = room(d, 3)
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, parts[at].contiguous(), after), dist.P2POp(dist.irecv, got, before)]
            )
            for work in works:
                work.wait()
            into = (at - 1) % WORLD
            parts[into] = got if phase else parts[into] + got
    return torch.cat(parts)


@program("exchanged")
def by_hand_in_turn(d: str) -> Any:
    """Handles that are waited for out of order, with work in between; tags; from anyone."""
    x = waves(d, 6, shift=RANK)
    works: list[Any] = []
    boxes = [room(d, 6) for _ in range(WORLD)]
    for other in range(WORLD):
        if other != RANK:
            works.append(dist.irecv(boxes[other], other, tag=3))
            works.append(dist.isend(x * (other + 1), other, tag=3))
    y = (x @ x).exp()
    for work in reversed(works):
        work.wait()
    first = dist.all_reduce(z := x * 2, async_op=True)
    second = dist.all_gather_into_tensor(w := room(d, 6 * WORLD), x + 1, async_op=True)
    y = y + x.sum()
    assert second is not None and first is not None
    second.wait()
    first.wait()
    if RANK == 0:
        anyone = room(d, 2)
        senders = sorted(dist.recv(anyone) for _ in range(WORLD - 1))  # type: ignore[type-var]
    else:
        dist.send(numbers(d, 2), 0)
        senders = []
    return [boxes[r] for r in range(WORLD) if r != RANK], y, z, w, senders


@program("exchanged")
def many_as_one(d: str) -> Any:
    """The coalescing manager, with and without handles."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    many = [waves(d, 3 + k, shift=RANK + k) for k in range(4)]
    with _coalescing_manager():
        for t in many:
            dist.all_reduce(t)
    wholes = [room(d, WORLD * (2 + k)) for k in range(3)]
    with _coalescing_manager(async_ops=True) as manager:
        for k, t in enumerate(wholes):
            dist.all_gather_into_tensor(t, numbers(d, 2 + k))
    manager.wait()
    parts = [room(d, 2 + k) for k in range(3)]
    with _coalescing_manager():
        for k, t in enumerate(parts):
            dist.reduce_scatter_tensor(t, numbers(d, WORLD * (2 + k)))
    return many, wholes, parts


@program("exchanged")
def with_their_gradients(d: str) -> Any:
    """The collectives that autograd goes through."""
    import torch.distributed.nn.functional as through

    x = waves(d, 4, 3, shift=RANK).requires_grad_()
    group = dist.group.WORLD  # the default is the group that there was when torch was imported
    assert group is not None
    y = through.all_reduce(x * 2, group=group) + through.all_gather(x, group)[0] + through.broadcast(x.sin(), 0, group)
    y = y + through.reduce_scatter(room(d, 4, 3), [x * k for k in range(WORLD)], group=group)
    (y * waves(d, 4, 3)).sum().backward()
    z = waves(d, 2 * WORLD, 3, shift=RANK).requires_grad_()
    whole_ = functional.all_gather_tensor_autograd(z, 0, group)
    part = functional.reduce_scatter_tensor_autograd(whole_.square(), "sum", 0, group)
    part.sum().backward()
    return y.detach(), x.grad, part.detach(), z.grad


@program("exchanged")
def sharded_tensors_in_many_ways(d: str) -> Any:
    from torch.distributed.tensor import (
        DTensor,
        Partial,
        Replicate,
        Shard,
        distribute_module,
        distribute_tensor,
        empty,
        ones,
        zeros,
    )  # fmt: skip

    mesh = mesh_of(d)
    full = waves(d, 7, 5)
    a = distribute_tensor(full, mesh, [Shard(0)])  # 7 rows: parts of other sizes
    b = DTensor.from_local(waves(d, 5, 5, shift=RANK), mesh, [Partial()])
    c = (a @ b.redistribute(mesh, [Replicate()])).relu()
    d1 = c.sum(0).redistribute(mesh, [Replicate()]).to_local()
    normed = nn.functional.layer_norm(a, [5]).full_tensor()
    soft = a.redistribute(mesh, [Shard(1)]).softmax(-1).full_tensor()
    a[1:3] if WORLD == 1 else a.mul_(2)
    made = [ones(4, 4, device_mesh=mesh, placements=[Shard(0)]) * 3, zeros(3, 2, device_mesh=mesh)]
    empty(2, 2, device_mesh=mesh)
    model = distribute_module(net().to(d), mesh)
    loss = model(distribute_tensor(waves(d, 4 * WORLD, 8), mesh, [Shard(0)])).square().mean()
    loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    top, at = a.redistribute(mesh, [Replicate()]).topk(2, -1)
    return [c.full_tensor(), d1, normed, soft, a.full_tensor(), *whole(made), loss.full_tensor().detach(), grads,  # type: ignore[attr-defined]
            top.full_tensor(), at.full_tensor(), a.norm().full_tensor(), a.max().full_tensor()]  # type: ignore[attr-defined]  # fmt: skip


@program("exchanged")
def a_mesh_of_two_dimensions(d: str) -> Any:
    """Its groups, its parts, and both as one; FSDP2 over one and tensor parallel over the other, with clipping."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of(d, WORLD // 2, 2, names=("dp", "tp"))
    both = mesh["dp", "tp"]._flatten("both")
    x = numbers(d, 3)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    y = numbers(d, 3)
    dist.all_reduce(y, group=both.get_group())
    model = parallel_words(d, mesh["tp"])
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    losses = []
    for step in range(2):
        ids, wanted = text(d, step, rank=mesh.get_local_rank("dp"))
        out = model(ids)
        out = out.full_tensor() if hasattr(out, "full_tensor") else out
        loss = cross_entropy(out, wanted)
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), *whole([total])]
    return x, y, mesh.get_coordinate(), losses, whole(model.parameters())


def _stages(d: str, at: list[int], count: int) -> list[nn.Module]:
    """Parts of a language model; the first has the words, the last the head."""

    class Part(nn.Module):
        def __init__(self, full: Words, index: int) -> None:
            super().__init__()
            per = len(full.layers) // count
            self.embed = full.embed if index == 0 else None
            self.layers = full.layers[index * per : (index + 1) * per]
            self.head = nn.Sequential(full.norm, full.head) if index == count - 1 else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x) if self.embed is not None else x
            for layer in self.layers:  # type: ignore[union-attr]
                x = layer(x)
            return self.head(x) if self.head is not None else x

    torch.manual_seed(0)
    full = Words(layers=count)
    return [Part(full, i).to(d) for i in at]


def _through_a_pipeline(d: str, name: str, each: int, in_a_v: bool = False) -> Any:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    count = WORLD * each
    at = [RANK, count - 1 - RANK] if in_a_v else [RANK + WORLD * k for k in range(each)]
    parts = _stages(d, at, count)
    stages = [PipelineStage(part, i, count, torch.device(d)) for part, i in zip(parts, at, strict=True)]
    kind: Any = get_schedule_class(name)
    schedule = kind(stages if each > 1 else stages[0], n_microbatches=2 * WORLD, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    losses: list[Any] = []
    for step in range(2):
        n = 2 * WORLD
        x, y = ((torch.arange(n * 8) * (5 + step + k)).remainder(31).view(n, 8).to(d) for k in range(2))
        found: list[torch.Tensor] = []
        last = count - 1 in at
        given = (x,) if 0 in at else ()
        schedule.step(*given, **({"target": y, "losses": found} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach() for loss in found]
    return losses, [p.detach() for part in parts for p in part.parameters()]


for _name, _each, _in_a_v in (
    ("GPipe", 1, False), ("1F1B", 1, False), ("Interleaved1F1B", 2, False), ("LoopedBFS", 2, False),
    ("InterleavedZeroBubble", 2, False), ("ZBVZeroBubble", 2, True), ("DualPipeV", 2, True),
):  # fmt: skip

    @program("exchanged", f"a language model through {_name}")
    def through(d: str, name: str = _name, each: int = _each, in_a_v: bool = _in_a_v) -> Any:
        return _through_a_pipeline(d, name, each, in_a_v)


@program("exchanged")
def attention_over_parts_of_the_sequence(d: str) -> Any:
    """torch's own context parallel, which it has for accelerators: on the CPU, each rank has the whole sequence."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    q, k, v = (waves(d, 2, 2, 8 * WORLD, 4, shift=i) for i in range(3))
    if d == "cpu":
        given = [t.requires_grad_() for t in (q, k, v)]
        expected = nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        expected.sin().sum().backward()
        return [expected.detach(), *[t.grad for t in given]]
    mesh = mesh_of(d)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        parts = [t.detach().requires_grad_() for t in (q, k, v)]
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        out.sin().sum().backward()
        grads = [t.grad for t in parts]
        return context_parallel_unshard(mesh, [out.detach(), *grads], [2] * 4)


@program("exchanged")
def attention_of_sharded_heads(d: str) -> Any:
    """Projections of whole tensors whose heads are sharded. torch shards attention for accelerators alone."""
    from torch.distributed.tensor import Shard, distribute_tensor

    given = [waves(d, 2, 2 * WORLD, 6, 4, shift=i) for i in range(3)]
    mesh = mesh_of(d)
    parts: list[Any] = [t if d == "cpu" else distribute_tensor(t, mesh, [Shard(1)]) for t in given]
    masked = torch.tril(torch.ones(6, 6, device=d)) > 0
    parts = [t.requires_grad_() for t in parts]
    out: Any = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=0.3)
    out.sin().sum().backward()
    found = [out.detach(), *[t.grad for t in parts]]
    if d == "cpu":
        found.append(nn.functional.scaled_dot_product_attention(*given, attn_mask=masked))
        return found
    mask = distribute_tensor(masked, mesh)
    found.append(nn.functional.scaled_dot_product_attention(*[t.detach() for t in parts], attn_mask=mask))
    return whole(found)


@program("exchanged")
def groups_of_many_kinds(d: str) -> Any:
    own, all_groups = dist.new_subgroups(2)
    x = numbers(d, 4)
    dist.all_reduce(x, group=own)
    odd_even, _ = dist.new_subgroups_by_enumeration([[r for r in range(WORLD) if r % 2 == k] for k in range(2)])
    y = numbers(d, 4)
    dist.broadcast(y, group=odd_even, group_src=0)
    z = [room(d, 4) for _ in range(dist.get_world_size(own))]
    dist.all_gather(z, numbers(d, 4), group=own)
    for group in all_groups:
        if dist.get_rank(group) >= 0:
            dist.barrier(group)
    w = numbers(d, 3)
    dist.reduce(w, WORLD - 1, op=dist.ReduceOp.MAX)
    return x, y, z, w if RANK == WORLD - 1 else []


@program("exchanged")
def words_and_their_model(d: str) -> Any:
    """A model is made on one rank and sent as an object; its outputs are gathered as objects."""
    model = [words(d) if RANK == 0 else None]
    dist.broadcast_object_list(model, 0, device=torch.device(d, 0) if d != "cpu" else None)
    assert model[0] is not None
    out = model[0].to(d)(text(d, 0)[0])
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, {"out": out.detach(), "rank": RANK})
    return [f["out"] for f in found], [f["rank"] for f in found]
