"""Temporaries: a region that would take more at once than the heap keeps is cut in front of products, no other is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from fused_eager.buffers import Home
from fused_eager.order import operands
from fused_eager.plan import Plan, make_plan, validate
from fused_eager.stream import Node
from fused_eager.temporaries import MOST
from tests.streams import END, aten, events, node

QUARTER: Home = (torch.float32, (MOST // 16,))  # four of these are `MOST`
TANH, PRODUCT = aten.tanh.default, aten.mm.default


def plan_of(nodes: list[Node], live: list[int]) -> Plan:
    homes = {0: QUARTER, **{r.vid: r.home for n in nodes for r in n.results}}
    made = make_plan(nodes, frozenset(live), frozenset(), homes, {}, 10_000, END)
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


def kept_inside(nodes: list[Node], plan: Plan) -> list[int]:
    """Bytes of the values that each region makes, reads and keeps to itself."""
    out = []
    for region in plan.regions:
        read = {v for i in region.nodes for v in operands(nodes[i])}
        made = {r.vid for i in region.nodes for r in nodes[i].results}
        out.append(len((made & read) - set(region.outputs)) * MOST // 4)
    return out


@pytest.mark.parametrize("layers", [3, 7, 20])
def test_no_region_keeps_more_than_the_heap_has_room_for(layers: int) -> None:
    nodes = there_and_back(layers)
    plan = plan_of(nodes, [len(nodes)])
    assert len(plan.regions) > 1 and max(kept_inside(nodes, plan)) <= MOST
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


def test_a_chain_of_pointwise_ops_stays_whole_however_large() -> None:
    nodes = [node(i + 1, [i], TANH, home=QUARTER) for i in range(40)]
    assert len(plan_of(nodes, [40]).regions) == 1


def test_equal_plans_for_equal_streams() -> None:
    assert plan_of(there_and_back(7), [28]) == plan_of(there_and_back(7), [28])


def test_training_in_parts_is_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and weights of a step that is cut are eager's."""
    monkeypatch.setattr("fused_eager.temporaries.MOST", 4096)

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(64, 16)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [t.detach() for p in model.parameters() for t in (p, p.grad) if t is not None]

    plain = train()
    with events("plan") as seen, fused_eager(mode="fused"):
        ours = train()
    assert any("region.memory" in str(e.data) for e in seen)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
