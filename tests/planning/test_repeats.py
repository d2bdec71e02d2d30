"""Repeats: equal layers are cut apart and compiled once; what would cost more than it saves stays whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fused_eager import fused_eager, report
from fused_eager.bounded import Bounded
from fused_eager.compiling import causes, compile
from fused_eager.devices.home import Home
from fused_eager.planning.plan import Plan, make_plan, validate
from fused_eager.planning.repeats import LEAST, PART, Repeat, longest
from fused_eager.tracing import trace
from fused_eager.tracing.stream import Node
from tests.streams import END, HOME, aten, events, node

BIG: Home = (torch.float32, (64,))
RELU, PRODUCT = aten.relu.default, aten.mm.default


def plan_of(nodes: list[Node]) -> Plan:
    """The plan of a stream that reads value 0, of which the last value is live."""
    homes = {0: HOME, **{r.vid: r.home for n in nodes for r in n.results}}
    live = frozenset([nodes[-1].results[0].vid])
    made = make_plan(nodes, live, frozenset(), homes, {}, 10_000, END)
    validate(made, nodes, live)
    return made


def layers(times: int, ops: int, product: bool) -> list[Node]:
    """A chain of `times` layers of `ops` ops, the second half of which is wide, with or without a product."""
    nodes: list[Node] = []
    for _ in range(times):
        for k in range(ops):
            op = PRODUCT if product and k == ops - 1 else RELU
            last = len(nodes)
            nodes.append(node(last + 1, [last], op, structure=k, home=HOME if k < ops // 2 else BIG))
    return nodes


def sizes(plan: Plan) -> list[int]:
    return [len(r.nodes) for r in plan.regions]


def test_layers_are_cut_where_they_hand_on_least() -> None:
    plan = plan_of(layers(6, 40, product=True))
    assert {r.ended_by.code for r in plan.regions[:-1]} == {"region.repeat"} and plan.regions[-1].ended_by == END
    assert "40 ops, 6 times" in plan.regions[0].ended_by.detail
    # The narrow half is behind the cut, but for one op: what is handed on is narrow.
    assert sizes(plan) == [1, 40, 40, 40, 40, 40, 39]


def test_a_device_may_want_longer_regions_whole() -> None:
    nodes = layers(6, 40, product=True)
    homes = {0: HOME, **{r.vid: r.home for n in nodes for r in n.results}}
    live = frozenset([nodes[-1].results[0].vid])
    for least, expected in ((len(nodes), 7), (len(nodes) + 1, 1)):
        made = make_plan(nodes, live, frozenset(), homes, {}, 10_000, END, layered_from=least)
        assert len(made.regions) == expected


def test_short_layers_share_a_region() -> None:
    inner = sizes(plan_of(layers(30, 10, product=True)))[1:-1]
    assert set(inner) == {40} and PART <= 40


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(layers(40, 10, product=False), id="pointwise"),
        pytest.param(layers(2, 100, product=True), id="twice"),
        pytest.param(layers(3, LEAST // 3 - 1, product=True), id="short"),
    ],
)
def test_what_would_cost_more_than_it_saves_stays_whole(nodes: list[Node]) -> None:
    assert len(plan_of(nodes).regions) == 1


def test_independent_work_is_cut_though_it_is_pointwise() -> None:
    nodes: list[Node] = []
    for i in range(10):
        first = 1000 * i + 1
        nodes.append(node(first, [0], structure=99))
        nodes += [node(first + k + 1, [first + k], structure=k) for k in range(39)]
    homes = {0: HOME, **{r.vid: r.home for n in nodes for r in n.results}}
    ends = frozenset(n.results[0].vid for n in nodes[39::40])
    plan = make_plan(nodes, ends, frozenset(), homes, {}, 10_000, END)
    validate(plan, nodes, ends)
    assert sizes(plan) == [40] * 10


def test_one_other_layer_in_between_parts_two_repeats() -> None:
    other = layers(1, 7, product=True)
    nodes = layers(5, 40, product=True)
    for part in (other, layers(5, 40, product=True)):
        shift = len(nodes)
        for n in part:
            made = n.results[0]
            structure = n.signature[0] + 1000 * (part is other)  # type: ignore[index]
            nodes.append(node(made.vid + shift, [made.vid + shift - 1], n.op, structure, made.home))
    assert sizes(plan_of(nodes)).count(40) == 8


def brute(letters: list[int], least: int) -> int:
    """The most letters that a tandem repeat of at least three runs covers; 0 if none covers `least`."""
    covered = 0
    for start in range(len(letters)):
        for period in range(1, (len(letters) - start) // 3 + 1):
            times = 1
            first = letters[start : start + period]
            while letters[start + times * period :][:period] == first:
                times += 1
            if times >= 3 and times * period >= least:
                covered = max(covered, times * period)
    return covered


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(3, 12))
@settings(max_examples=300, deadline=None)
def test_the_longest_repeat_of_any_string(letters: list[int], least: int) -> None:
    found = longest(np.array(letters), least)
    assert (found.end - found.start if found else 0) == brute(letters, least)
    if found is not None:
        runs = [letters[found.start + k * found.period :][: found.period] for k in range(found.times)]
        assert all(run == runs[0] for run in runs) and found.end <= len(letters)


def test_of_equal_repeats_the_shortest_period_is_taken() -> None:
    assert longest(np.array([7, *[1, 2] * 6, 8]), 3) == Repeat(1, 2, 6)


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * 0.5
        return x


def train(depth: int, mode: str) -> tuple[list[float], int]:
    """Losses of three steps, and how many regions were compiled."""
    torch.manual_seed(0)
    model = Deep(depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, losses = torch.randn(4, 8), []
    with fused_eager(mode=mode, compile="wait", native="never", cache="off"):
        report(reset=True)
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, report().compilations


def test_a_deeper_model_compiles_no_more_regions() -> None:
    shallow, compiled = train(20, "fused")
    deep, again = train(60, "fused")
    assert 3 <= compiled <= 12
    # The ends of a deep model are not those of a shallow one; its layers are the same.
    assert again <= compiled
    for depth, losses in ((20, shallow), (60, deep)):
        assert losses == pytest.approx(train(depth, "off")[0], rel=1e-4)


def test_a_layer_that_follows_its_like_is_no_other_form_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a plan begin at one line, with other ops each; but no round has changed."""
    monkeypatch.setattr(causes, "MEMORY", causes.Memory())
    monkeypatch.setattr(compile, "MEMORY", Bounded(64))
    monkeypatch.setattr(trace.MEMORY, "root", trace._root())
    with events("compile") as seen:
        train(20, "fused")
    told = [e.data["cause"] for e in seen]
    assert len(told) > 3 and "ops" not in told, told
