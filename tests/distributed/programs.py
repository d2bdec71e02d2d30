"""What ranks run: each program trains, and returns what every rank should have in the end.

A program is given its rank, and what it is to enter where the library is to work.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import _pytree as pytree

Context = Callable[[], contextlib.AbstractContextManager[Any]]
IMPATIENT = timedelta(seconds=15)  # for ranks that wait for one that has gone
SMALL = 0.01  # megabytes: a bucket for about each parameter


def network(width: int = 24) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 200), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 4)
    )


def momentum(parameters: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def batches(rank: int, steps: int, rows: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    maker = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(rows, 8, generator=maker), torch.randn(rows, 4, generator=maker)) for _ in range(steps)]


def train(
    rank: int,
    context: Context,
    steps: int = 4,
    made: str = "inside",
    model: Callable[[], nn.Module] = network,
    prepare: Callable[[DDP], Any] | None = None,
    each: Callable[[DDP, int], Any] | None = None,
    set_to_none: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = momentum,
    **options: Any,
) -> Any:
    """Train a model; `made`: whether its DDP is made inside of the context, before it, or each step has its own one."""
    losses: list[float] = []
    seen: list[Any] = []

    def make() -> tuple[DDP, torch.optim.Optimizer]:
        ddp = DDP(model(), **options)
        if prepare is not None:
            prepare(ddp)
        return ddp, optimizer(ddp.parameters(), lr=0.05)

    def step(at: int, x: torch.Tensor, y: torch.Tensor) -> None:
        ddp, opt = pair
        opt.zero_grad(set_to_none=set_to_none)
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        if each is not None:
            seen.append(each(ddp, at))
        opt.step()
        losses.append(loss.item() if at % 2 else loss.detach())

    data = batches(rank, steps)
    if made == "inside":
        with context():
            pair = make()
            for i, (x, y) in enumerate(data):
                step(i, x, y)
    elif made == "before":
        pair = make()
        with context():
            for i, (x, y) in enumerate(data):
                step(i, x, y)
    elif made == "warm":
        pair = make()
        for i, (x, y) in enumerate(data[:2]):
            step(i, x, y)
        with context():
            for i, (x, y) in enumerate(data[2:]):
                step(i, x, y)
    else:
        pair = make()
        for i, (x, y) in enumerate(data):
            with context():
                step(i, x, y)
    grads = {n: p.grad for n, p in pair[0].named_parameters()}
    return [float(a) for a in losses], seen, dict(pair[0].state_dict()), grads


def made_inside(rank: int, context: Context) -> Any:
    return train(rank, context)


def made_before(rank: int, context: Context) -> Any:
    return train(rank, context, made="before")


def made_warm(rank: int, context: Context) -> Any:
    return train(rank, context, made="warm")


def each_step(rank: int, context: Context) -> Any:
    return train(rank, context, made="each")


def small_buckets(rank: int, context: Context) -> Any:
    return train(rank, context, bucket_cap_mb=SMALL)


def bucket_view(rank: int, context: Context) -> Any:
    return train(rank, context, gradient_as_bucket_view=True)


def clip(ddp: DDP, at: int) -> Any:
    return nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)


def bucket_view_small(rank: int, context: Context) -> Any:
    return train(rank, context, gradient_as_bucket_view=True, bucket_cap_mb=SMALL, set_to_none=False, each=clip)


def bucket_view_clip(rank: int, context: Context) -> Any:
    return train(rank, context, gradient_as_bucket_view=True, each=clip)


def bucket_view_warm(rank: int, context: Context) -> Any:
    return train(rank, context, made="warm", gradient_as_bucket_view=True, each=clip)


def static_graph(rank: int, context: Context) -> Any:
    return train(rank, context, static_graph=True)


def static_graph_view(rank: int, context: Context) -> Any:
    return train(rank, context, static_graph=True, gradient_as_bucket_view=True, made="each", bucket_cap_mb=SMALL)


def batched_copy(rank: int, context: Context) -> Any:
    return train(rank, context, batched_grad_copy=True)


def batched_copy_view(rank: int, context: Context) -> Any:
    return train(rank, context, batched_grad_copy=True, gradient_as_bucket_view=True)


def loosely(tree: Any) -> Any:
    """Numbers that have gone through 16 bits, where a last digit of 32 may decide which of two they become."""
    return pytree.tree_map(lambda leaf: leaf / 20, tree)


def fp16_hook(rank: int, context: Context) -> Any:
    return loosely(
        train(rank, context, prepare=lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))
    )


def fp16_view_before(rank: int, context: Context) -> Any:
    return loosely(
        train(
            rank,
            context,
            made="before",
            gradient_as_bucket_view=True,
            bucket_cap_mb=SMALL,
            prepare=lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        )
    )


def allreduce_hook(rank: int, context: Context) -> Any:
    return train(
        rank,
        context,
        made="before",
        bucket_cap_mb=SMALL,
        prepare=lambda ddp: ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook),
    )


def builtin_fp16_hook(rank: int, context: Context) -> Any:
    return loosely(
        train(
            rank, context, prepare=lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        )
    )


def builtin_allreduce_hook(rank: int, context: Context) -> Any:
    return train(
        rank,
        context,
        gradient_as_bucket_view=True,
        prepare=lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    )


def power_sgd(rank: int, context: Context) -> Any:
    def prepare(ddp: DDP) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return train(rank, context, steps=6, prepare=prepare)


def own_hook(rank: int, context: Context) -> Any:
    """A hook that looks at everything, keeps state that the context makes, and works on in what follows the future."""

    def prepare(ddp: DDP) -> None:
        state = {"scale": torch.ones(()) * 2, "seen": torch.zeros(()), "norms": []}

        def hook(state: dict[str, Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            state["seen"] += buffer.norm()
            state["norms"].append(float(buffer.sum()))
            assert buffer.data_ptr() == bucket.gradients()[0].data_ptr()
            assert all(p.untyped_storage().nbytes() for p in bucket.parameters())
            doubled = buffer * state["scale"] / dist.get_world_size()
            work = dist.all_reduce(doubled, async_op=True)

            def after(future: Any) -> torch.Tensor:
                return future.value()[0] / state["scale"] + 0 * state["seen"]

            return work.get_future().then(after)

        ddp.register_comm_hook(state, hook)

    return train(rank, context, prepare=prepare, bucket_cap_mb=SMALL)


def ready_future(rank: int, context: Context) -> Any:
    """A hook that returns a future that is done, of a value that is not."""

    def prepare(ddp: DDP) -> None:
        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            total = bucket.buffer() / dist.get_world_size()
            dist.all_reduce(total)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(total * 0.5)
            return future

        ddp.register_comm_hook(None, hook)

    return train(rank, context, prepare=prepare, gradient_as_bucket_view=True)


class Branches(nn.Module):
    """Uses one of its branches, by the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(8, 16)
        self.branches = nn.ModuleList([nn.Linear(16, 4) for _ in range(3)])
        self.frozen = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.trunk(x).tanh()
        return self.branches[self.calls % 3](hidden)


def unused(rank: int, context: Context) -> Any:
    return train(rank, context, steps=6, model=Branches, find_unused_parameters=True)


def unused_view(rank: int, context: Context) -> Any:
    return train(
        rank, context, steps=6, made="before", model=Branches, find_unused_parameters=True, gradient_as_bucket_view=True
    )


def unused_keeps(rank: int, context: Context) -> Any:
    return train(rank, context, steps=6, model=Branches, find_unused_parameters=True, set_to_none=False, made="each")


class Static(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[1](self.trunk(x).tanh())


def unused_static(rank: int, context: Context) -> Any:
    return train(rank, context, model=Static, static_graph=True, set_to_none=False)


def no_sync(rank: int, context: Context, **options: Any) -> Any:
    with context():
        ddp = DDP(network(), **options)
        opt = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for i, (x, y) in enumerate(batches(rank, 9)):
            last = i % 3 == 2
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = (ddp(x) - y).square().mean() / 3
                loss.backward()
            losses.append(loss.detach())
            if last:
                opt.step()
                opt.zero_grad(set_to_none=i == 2)
    return [float(a) for a in losses], dict(ddp.state_dict())


def no_sync_view(rank: int, context: Context) -> Any:
    return no_sync(rank, context, gradient_as_bucket_view=True, bucket_cap_mb=SMALL)


class Counted(nn.Module):
    """Has buffers of all kinds, which rank 0 sends to the others before each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.Linear(12, 4))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.steps += 1
        return y + self.average


def buffers(rank: int, context: Context) -> Any:
    return train(rank, context, model=Counted)


def buffers_before(rank: int, context: Context) -> Any:
    return train(rank, context, model=Counted, made="before", gradient_as_bucket_view=True)


def own_buffers(rank: int, context: Context) -> Any:
    return train(rank, context, model=Counted, broadcast_buffers=False)


def looks(rank: int, context: Context) -> Any:
    """Hooks of all kinds that look at gradients and at their memory."""
    seen: list[Any] = []

    def prepare(ddp: DDP) -> None:
        for p in ddp.parameters():
            p.register_hook(lambda grad: (seen.append(float(grad.sum())), grad.data_ptr())[0])
            p.register_post_accumulate_grad_hook(
                lambda p: seen.append((float(p.grad.norm()), p.grad.untyped_storage().nbytes(), p.grad.data_ptr() != 0))
            )
        for module in ddp.module.modules():
            module.register_full_backward_hook(
                lambda module, gin, gout: seen.extend(g.is_contiguous() and g.data_ptr() != 0 for g in gout)
            )

    out = train(rank, context, prepare=prepare, made="before")
    return out, seen


def later_hooks(rank: int, context: Context) -> Any:
    """Hooks of the program's that come after, and that change the gradient before it is reduced."""

    def each(ddp: DDP, at: int) -> Any:
        if at == 1:
            for p in ddp.parameters():
                p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
                p.register_hook(lambda grad: grad * 2 + 0.01)
        return [p.grad.data_ptr() == p.grad.untyped_storage().data_ptr() for p in ddp.parameters()]

    return train(rank, context, steps=5, each=each)


def in_place_grad(rank: int, context: Context) -> Any:
    """A hook that swaps the gradient for another one."""

    def prepare(ddp: DDP) -> None:
        for p in ddp.parameters():

            def swap(p: torch.Tensor) -> None:
                p.grad = p.grad * 2

            p.register_post_accumulate_grad_hook(swap)

    return train(rank, context, prepare=prepare, made="before")


def reads(rank: int, context: Context) -> Any:
    return train(rank, context, each=lambda ddp, at: [float(p.grad.norm()) for p in ddp.parameters()])


def optimizer_in_hooks(rank: int, context: Context) -> Any:
    """Torch's own: a parameter is stepped in a communication hook, as soon as its bucket has been reduced."""

    def prepare(ddp: DDP) -> None:
        ddp._register_fused_optim(torch.optim.SGD, 0.05, momentum=0.9)

    def no_step(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    return train(rank, context, steps=6, prepare=prepare, optimizer=no_step, bucket_cap_mb=SMALL)


def optimizer_of_each(rank: int, context: Context) -> Any:
    """Optimizers of single parameters that hooks behind the reducer step, in the middle of a backward pass."""
    optimizers: dict[Any, torch.optim.Optimizer] = {}

    def each(ddp: DDP, at: int) -> Any:
        if at == 0:
            for p in ddp.parameters():
                optimizers[p] = momentum([p], lr=0.01)

                def step(p: torch.Tensor) -> None:
                    optimizers[p].step()

                p.register_post_accumulate_grad_hook(step)
        return [float(p.detach().sum()) for p in ddp.parameters()]

    return train(rank, context, steps=5, each=each)


def noop_hook(rank: int, context: Context) -> Any:
    """A hook that leaves the gradients of each rank as they are: the ranks part."""
    out = train(rank, context, prepare=lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook))
    return out[0]


def told(rank: int, context: Context) -> Any:
    """What DistributedDataParallel logs of itself, with the statistics of each pass."""

    def each(ddp: DDP, at: int) -> Any:
        data = ddp._get_ddp_logging_data()
        return data["world_size"], data["iteration"], data["num_parameter_tensors"]

    return train(rank, context, steps=6, each=each, prepare=lambda ddp: ddp._set_ddp_runtime_logging_sample_rate(1))


class Shared(nn.Module):
    """A parameter that is used twice, and gradients that are views of one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.first(x).tanh()) + torch.stack([self.a, self.b, self.c]).sum(0)
        return self.last(x * torch.cat([self.a, self.b, self.c])[4:12])


def shared(rank: int, context: Context) -> Any:
    return train(rank, context, model=Shared)


def twice(rank: int, context: Context) -> Any:
    """Two wrapped models in one graph, and two backward passes over the same graph."""
    with context():
        one, two = DDP(network(), bucket_cap_mb=SMALL), DDP(nn.Linear(4, 4))
        losses = []
        for x, y in batches(rank, 4):
            loss = (two(one(x)) - y).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in (*one.parameters(), *two.parameters()):
                    p -= 0.05 * p.grad
                    p.grad = None
            losses.append(loss.detach())
    return [float(a) for a in losses], dict(one.state_dict()), dict(two.state_dict())


def checkpointed(rank: int, context: Context) -> Any:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, checkpoint(lambda x: x * 1.5, x, use_reentrant=False), use_reentrant=True)

    def run(made: str) -> Any:
        data = batches(rank, 4)
        with context():
            ddp = DDP(Recomputed(), static_graph=True)
            losses = []
            for x, y in data:
                loss = (ddp(x.requires_grad_()) - y).square().mean()
                loss.backward()
                with torch.no_grad():
                    for p in ddp.parameters():
                        p -= 0.05 * p.grad
                losses.append(loss.detach())
        return [float(a) for a in losses], dict(ddp.state_dict())

    return run("inside")


def sparse(rank: int, context: Context) -> Any:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.table = nn.Embedding(20, 8, sparse=True)
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.table((x[:, :3].abs() * 5).long().clamp(max=19)).sum(1))

    return train(rank, context, model=Table, optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr))


def half(rank: int, context: Context) -> Any:
    def mixed() -> nn.Module:
        net = network()
        net[4] = net[4].double()

        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.net:
                    x = layer(x.to(next(layer.parameters(), x).dtype))
                return x.float()

        return Cast()

    return train(rank, context, model=mixed)


def autocast(rank: int, context: Context) -> Any:
    with context():
        ddp = DDP(network())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
        losses = []
        for x, y in batches(rank, 4):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (ddp(x).float() - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(float(loss.detach()))
    return [round(a, 1) for a in losses]


def uneven(rank: int, context: Context) -> Any:
    from torch.distributed.algorithms.join import Join

    with context():
        ddp = DDP(network(), bucket_cap_mb=SMALL)
        opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
        losses = []
        with Join([ddp]):
            for x, y in batches(rank, 3 + 2 * rank):
                opt.zero_grad()
                loss = (ddp(x) - y).square().mean()
                loss.backward()
                opt.step()
                losses.append(loss.detach())
    return [float(a) for a in losses], dict(ddp.state_dict())


def uneven_before(rank: int, context: Context) -> Any:
    ddp = DDP(Counted(), gradient_as_bucket_view=True)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    with context(), ddp.join(divide_by_initial_world_size=False):
        for x, y in batches(rank, 5 - 2 * rank):
            opt.zero_grad()
            loss = (ddp(x) - y).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
    return [float(a) for a in losses], dict(ddp.state_dict())


def zero_optimizer(rank: int, context: Context) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def shards(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, lr=lr, momentum=0.9)

    return train(rank, context, optimizer=shards)


def steps_of(net: torch.nn.Module, rank: int) -> list[torch.Tensor]:
    """The losses of a few steps, which nobody has read yet."""
    opt = momentum(net.parameters())
    losses = []
    for x, y in batches(rank, 4):
        opt.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


def fully_sharded(rank: int, context: Context) -> Any:
    """Torch's other way to shard, which has no reducer."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with context():
        net = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
        losses = steps_of(net, rank)
    return [float(a) for a in losses]


def sharded_by_parameter(rank: int, context: Context) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with context():
        net = network()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net, mesh=mesh)
        losses = steps_of(net, rank)
    return [float(a) for a in losses]


def _raising(kind: str, everywhere: bool) -> Callable[[int, Context], Any]:
    """A hook of the program's raises in the third step, on one rank or on each. The rank that raised ends with its own
    error, and leaves; one that waits for it has an error of the process group's, at the latest when that has no more
    patience."""

    def program(rank: int, context: Context) -> Any:
        mine, steps = everywhere or rank == 0, [0]

        def fail(*args: Any) -> None:
            if mine and steps[0] == 2:
                raise ValueError("of a hook of mine")

        def prepare(ddp: DDP) -> None:
            last = list(ddp.parameters())[-2]
            if kind == "gradient":
                last.register_hook(fail)
            elif kind == "accumulated":
                last.register_post_accumulate_grad_hook(fail)
            elif kind == "module":
                ddp.module[-1].register_full_backward_hook(fail)
            else:
                ddp.register_comm_hook(None, reduce)

        def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if kind == "bucket":
                fail()
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: (fail(), done.value()[0] / dist.get_world_size())[1])

        def each(ddp: DDP, at: int) -> int:
            steps[0] = at + 1
            return at

        group = dist.new_group(timeout=IMPATIENT)
        try:
            return train(rank, context, steps=5, prepare=prepare, each=each, bucket_cap_mb=SMALL, process_group=group)
        except Exception as error:
            assert mine is ("of a hook of mine" in str(error)), error
            return steps[0]

    return program


raises_in_gradient = _raising("gradient", False)
raises_in_accumulated = _raising("accumulated", False)
raises_in_module = _raising("module", False)
raises_in_bucket = _raising("bucket", False)
raises_in_future = _raising("future", False)
raises_everywhere = _raising("accumulated", True)


def refused(rank: int, context: Context) -> Any:
    """What torch refuses it refuses with its own words: in its own order, so that no rank waits for another."""
    said: list[str] = []
    with context():
        ddp = DDP(network())
        x, y = batches(rank, 1)[0]
        for attempt in (
            lambda: (ddp(x) - y).square().mean().backward(create_graph=True),
            lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8)))(x),
            lambda: DDP(nn.Tanh()),
            lambda: DDP(network(), bucket_cap_mb=SMALL).register_comm_hook(None, lambda state: None),
        ):
            try:
                attempt()
            except Exception as error:
                said.append(f"{type(error).__name__}: {str(error)[:200]}")
            for p in ddp.parameters():
                p.grad = None
    return dict.fromkeys(said, 0)


def collectives(rank: int, context: Context) -> Any:
    """What is to be read of a tensor before a collective writes it is what it held then."""
    out: list[Any] = []
    big = torch.full((5000,), float(rank + 1))
    x = torch.arange(6.0) + rank
    with context():
        y = x * 2
        z = big + 1
        dist.all_reduce(x)
        dist.all_reduce(big)
        out += [y, z, x * 3, big.sum()]
        w = x * 5
        dist.broadcast(x, 1)
        out += [w, x + 1]
        parts = [torch.zeros(6) for _ in range(2)]
        before = [p + 1 for p in parts]
        dist.all_gather(parts, x * (rank + 1))
        out += [*before, *[p * 1 for p in parts]]
        whole = torch.zeros(12)
        kept = whole - 1
        dist.all_gather_into_tensor(whole, x - rank)
        out += [kept, whole + 0]
        piece = torch.ones(6)
        kept = piece * 4
        dist.reduce_scatter_tensor(piece, torch.cat([x, w]))
        out += [kept, piece * 1]
        sent = torch.arange(6.0) * (rank + 1)
        got = torch.zeros(6)
        kept = got + 7
        if rank == 0:
            dist.send(sent, 1)
            dist.recv(got, 1)
        else:
            dist.recv(got, 0)
            dist.send(sent, 0)
        out += [kept, got * 2]
        work = dist.all_reduce(got, async_op=True)
        other = sent.exp().sum()
        work.wait()
        out += [got + 1, other]
        thin = torch.diag(got).to_sparse()
        dist.all_reduce(thin)
        out.append(thin.to_dense())
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank, "mean": got.mean()})
        out += [o["mean"] for o in objects]
        dist.barrier()
    return [a.clone() for a in out]


def long_run(rank: int, context: Context) -> Any:
    """Long enough for everything to be compiled, chosen, and found warm the next time."""
    with context():
        ddp = DDP(network(64), bucket_cap_mb=0.1)
        opt = momentum(ddp.parameters(), lr=0.01)
        losses = []
        for x, y in batches(rank, 300, rows=64):
            opt.zero_grad()
            loss = (ddp(x) - y).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
            if len(losses) % 10 == 0:
                float(losses[-1])
    return [float(a) for a in losses], dict(ddp.state_dict())
