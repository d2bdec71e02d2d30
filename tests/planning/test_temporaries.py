"""Temporaries: a region that would take more at once than the heap keeps is cut in front of products, no other is."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import pytest
import torch
from torch import nn

from fused_eager import fused_eager, xla
from fused_eager.devices.home import Home
from fused_eager.devices.host.housekeeping import HOUSEKEEPING, HostHousekeeping
from fused_eager.executing import load
from fused_eager.planning.plan import Plan, make_plan, validate
from fused_eager.planning.temporaries import boundaries
from fused_eager.tracing.stream import Node
from tests.streams import END, aten, events, node

ROOM = HOUSEKEEPING.room
assert ROOM is not None
QUARTER: Home = (torch.float32, (ROOM // 16,))  # there is room for four of these
TANH, PRODUCT = aten.tanh.default, aten.mm.default


def plan_of(nodes: list[Node], live: list[int]) -> Plan:
    homes = {0: QUARTER, **{r.vid: r.home for n in nodes for r in n.results}}
    made = make_plan(nodes, frozenset(live), frozenset(), homes, {}, 10_000, END, room=ROOM)
    validate(made, nodes, frozenset(live))
    return made


def there_and_back(layers: int) -> list[Node]:
    """Products and functions of them, and the way back, which reads what each function gave."""
    nodes: list[Node] = []
    for _ in range(layers):
        for op in (PRODUCT, TANH):
            nodes.append(node(len(nodes) + 1, [len(nodes)], op, home=QUARTER))
    for layer in range(layers, 0, -1):
        nodes.append(node(len(nodes) + 1, [len(nodes), 2 * layer], TANH, home=QUARTER))
        nodes.append(node(len(nodes) + 1, [len(nodes)], PRODUCT, home=QUARTER))
    return nodes


@pytest.mark.parametrize("layers", [5, 7, 20])
def test_a_region_is_cut_in_front_of_a_product(layers: int) -> None:
    nodes = there_and_back(layers)
    plan = plan_of(nodes, [len(nodes)])
    assert len(plan.regions) > 1
    for region in plan.regions[:-1]:
        assert region.ended_by.code == "region.memory" and "MB of temporaries" in region.ended_by.detail
        following = max(region.nodes) + 1
        assert nodes[following].op is PRODUCT  # which nothing is fused with
    assert plan.regions[-1].ended_by == END


def test_what_there_is_room_for_stays_whole() -> None:
    assert len(plan_of(there_and_back(1), [4]).regions) == 1


def test_values_that_are_handed_out_take_no_room() -> None:
    nodes = there_and_back(7)
    assert len(plan_of(nodes, [r.vid for n in nodes for r in n.results]).regions) == 1


def test_what_is_read_beyond_a_cut_is_no_temporary() -> None:
    reads = [(0, PRODUCT)] * 8 + [(i, PRODUCT) for i in range(1, 9)] + [(i, TANH) for i in range(1, 9)]
    nodes = [node(i + 1, [read], op, home=QUARTER) for i, (read, op) in enumerate(reads)]
    homes = dict.fromkeys(range(25), QUARTER)
    assert boundaries(nodes[:16], range(16), homes, range(9, 17), (), ROOM)
    assert not boundaries(nodes, range(24), homes, range(9, 25), [16], ROOM)


def test_a_chain_of_pointwise_ops_stays_whole_however_large() -> None:
    nodes = [node(i + 1, [i], TANH, home=QUARTER) for i in range(40)]
    assert len(plan_of(nodes, [40]).regions) == 1


def test_equal_plans_for_equal_streams() -> None:
    assert plan_of(there_and_back(7), [28]) == plan_of(there_and_back(7), [28])


def layers(*kinds: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*[kind() for _ in range(6) for kind in kinds]).double()


NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "tanh": ((1024, 64), lambda: layers(lambda: nn.Linear(64, 64), nn.Tanh)),
    "gelu": ((1024, 64), lambda: layers(lambda: nn.LayerNorm(64), lambda: nn.Linear(64, 64), nn.GELU)),
    "images": (
        (4, 16, 32, 32),
        lambda: layers(lambda: nn.Conv2d(16, 16, 3, padding=1), lambda: nn.BatchNorm2d(16), nn.ReLU),
    ),
}


@pytest.mark.parametrize("name", ["gelu", *[pytest.param(n, marks=pytest.mark.slow) for n in NETS if n != "gelu"]])
def test_a_training_step_is_trained_in_parts_that_take_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What XLA takes of each region, where the step as a whole takes far more; and its results are eager's."""
    shape, net = NETS[name]
    taken: list[int] = []
    compile = xla.compiled

    def compiled(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
        made = compile(lowered, platform)
        taken.append(made.memory_analysis().temp_size_in_bytes)
        return made

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(*shape, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [t.detach() for p in model.parameters() for t in (p, p.grad) if t is not None]

    monkeypatch.setattr("fused_eager.xla.compiled", compiled)
    plain = train()
    load.forget()
    with fused_eager(mode="fused", compiler="thread"):
        train()
    most, allowed = max(taken), 4 * math.prod(shape) * 8  # bytes of four values of the net
    load.forget()
    taken.clear()
    monkeypatch.setattr(HostHousekeeping, "room", allowed * 3 // 4)
    with events("plan") as seen, fused_eager(mode="fused", compiler="thread"):
        ours = train()
    assert any("region.memory" in str(e.data) for e in seen)
    assert max(taken) <= allowed < most, (most, taken)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
