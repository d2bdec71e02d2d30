"""What stands around a reducer's hooks, in a group of one process: how often a step is cut, and what is left behind."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fused_eager import fused_eager
from fused_eager.devices.host import trap
from fused_eager.devices.storage import storage_of
from fused_eager.frontends.context import reducers
from fused_eager.log.events import LOG

FOUR = 4  # layers, each with a weight and a bias


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(FOUR)])


def flushes(**options: Any) -> Counter[str]:
    """Why the third step of a training was flushed, and how often."""
    x = torch.randn(3, 16)
    events: list[Any] = []
    with fused_eager(compile="wait", native="never"):
        ddp = DistributedDataParallel(model(), **options)
        for step in range(4):
            if step == 3:
                LOG.sinks.append(events.append)
            ddp(x).square().sum().backward()
            for p in ddp.parameters():
                p.grad = None
        LOG.sinks.remove(events.append)
    return Counter(event.data["reason"] for event in events if event.kind == "flush")


def test_a_bucket_costs_one_flush() -> None:
    assert flushes() == {"sync.collective": 1, "cut.backward": 1}


def test_so_do_several_buckets() -> None:
    """A kilobyte is one layer."""
    assert flushes(bucket_cap_mb=0.001, gradient_as_bucket_view=True) == {"sync.collective": FOUR}


def test_looking_for_unused_parameters_costs_one_more() -> None:
    """The reducer goes through those at the first gradient, and the map of the used ones is reduced as well."""
    assert flushes(find_unused_parameters=True) == {"sync.memory": 1, "sync.collective": 2, "cut.backward": 1}


def hooks(ddp: nn.Module) -> int:
    count = 0
    for p in ddp.parameters():
        count += len(p._post_accumulate_grad_hooks or ())
    return count


def test_nothing_is_left_on_parameters() -> None:
    ddp = DistributedDataParallel(model())
    x = torch.randn(3, 16)
    for _ in range(2):
        with fused_eager(compile="wait", native="never"):
            ddp(x).square().sum().backward()
            assert hooks(ddp) == 2 * FOUR
        assert hooks(ddp) == 0
    ddp(x).square().sum().backward()
    assert hooks(ddp) == 0


def test_a_forward_outside_and_a_backward_inside() -> None:
    ddp, same = DistributedDataParallel(model()), model()
    x = torch.randn(3, 16)
    for _ in range(3):
        out, other = ddp(x).square().sum(), same(x).square().sum()
        with fused_eager(compile="wait", native="never"):
            out.backward()
        other.backward()
    for p, q in zip(ddp.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_nothing_is_kept_of_a_reducer_that_has_gone() -> None:
    gc.collect()
    before = len(reducers.KNOWN)
    net = model()
    with fused_eager(compile="wait", native="never"):
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        ddp(torch.randn(3, 16)).square().sum().backward()
        del ddp
        gc.collect()
        assert len(reducers.KNOWN) == before
        assert hooks(net) == 0
        again = DistributedDataParallel(net)
        for _ in range(2):
            net.zero_grad()
            again(torch.ones(3, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_two_reducers_on_the_same_parameters() -> None:
    net, same = model(), model()
    x = torch.randn(3, 16)
    with fused_eager(compile="wait", native="never"):
        first = DistributedDataParallel(net)
        first(x).square().sum().backward()
        second = DistributedDataParallel(net)
        for _ in range(2):
            second(x).square().sum().backward()
            first(x).square().sum().backward()
    for _ in range(5):
        same(x).square().sum().backward()
    for p, q in zip(net.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_traps_are_closed_behind_the_reducer() -> None:
    """Between two hooks of the reducer, and after one that has raised, gradients refuse whoever comes past us."""
    seen: list[bool] = []
    net = model()

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            last = net[FOUR - 1].weight.grad
            assert last is not None
            seen.append(trap.is_armed(storage_of(last)))
            if len(seen) == 3:
                raise KeyError("ours")
            return grad * 1

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net[3](Looks.apply(self.net[2](self.net[1](self.net[0](x)))))

    with fused_eager(compile="wait", native="never"):
        ddp = DistributedDataParallel(Between())
        for _ in range(2):
            ddp(torch.randn(3, 16)).square().sum().backward()
            ddp.zero_grad()
        with pytest.raises(KeyError, match="ours"):
            ddp(torch.randn(3, 16)).square().sum().backward()
        assert not reducers.CURRENT.opened
    assert seen[1:] == [True, True]
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_hook_of_the_programs_on_the_node_itself() -> None:
    """It was there before the reducer: nobody can stand right behind that."""
    net, same = model(), model()
    norms: list[float] = []
    nodes = []
    for p in net.parameters():
        nodes.append(torch.autograd.graph.get_gradient_edge(p).node)
        nodes[-1].register_hook(lambda *grads, p=p: norms.append(float(p.grad.norm())))
    x = torch.randn(3, 16)
    with fused_eager(compile="wait", native="never"):
        ddp = DistributedDataParallel(net)
        for _ in range(3):
            ddp(x).square().sum().backward()
    for _ in range(3):
        same(x).square().sum().backward()
    for p, q in zip(net.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert len(norms) == 3 * 2 * FOUR


def test_a_collective_does_not_hold_others_up() -> None:
    """Two threads, each of which waits in an op of its own for what the other one computes."""
    library = torch.library.Library("fused_eager_tests", "FRAGMENT")
    library.define("meets(Tensor x) -> Tensor")
    barrier = threading.Barrier(2)

    def meets(x: torch.Tensor) -> torch.Tensor:
        barrier.wait(20)
        return x.clone()

    library.impl("meets", meets, "CPU")
    found: list[float] = []

    def body() -> None:
        with fused_eager(compile="wait", native="never"):
            found.append(float(torch.ops.fused_eager_tests.meets(torch.ones(3) * 2).sum()))

    threads = [threading.Thread(target=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [6.0, 6.0]


def test_what_torch_asks_for_by_identity() -> None:
    """The methods of the reducer are its own again when no context is open."""
    names = ("_rebuild_buckets", "_delay_all_reduce", "_run_comm_hook")
    before = [getattr(dist.Reducer, name) for name in names]
    with fused_eager():
        assert all(getattr(dist.Reducer, name) is not was for name, was in zip(names, before, strict=True))
    assert all(getattr(dist.Reducer, name) is was for name, was in zip(names, before, strict=True))
