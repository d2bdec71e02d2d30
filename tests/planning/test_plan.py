"""Plans: whatever the stream, regions run in an order that works; the validator refuses every other plan."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_eager.errors import ValidationError
from fused_eager.planning.plan import Plan, Region, make_plan, validate
from fused_eager.tracing.stream import Node
from tests.streams import END, HOME, aten, node

OTHER = (torch.float32, (3,))


def homes_of(nodes: Sequence[Node], inputs: Sequence[int]) -> dict[int, Any]:
    return {**dict.fromkeys(inputs, HOME), **{r.vid: r.home for n in nodes for r in n.results}}


def plan_of(
    nodes: Sequence[Node],
    live: Sequence[int],
    inputs: Sequence[int] = (0,),
    donatable: Sequence[int] = (),
    islands: Sequence[int] = (),
    cap: int = 1000,
    urgent: Sequence[int] = (),
) -> Plan:
    reasons, homes, first = dict.fromkeys(islands, "a test"), homes_of(nodes, inputs), frozenset(urgent)
    made = make_plan(nodes, frozenset(live), frozenset(donatable), homes, reasons, cap, END, urgent=first)
    validate(made, nodes, frozenset(live), frozenset(donatable))
    return made


def nodes_of(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    return [(r.how, r.nodes) for r in plan.regions]


CHAIN = [node(1, [0]), node(2, [1]), node(3, [2])]


def test_a_chain_is_one_region() -> None:
    (region,) = plan_of(CHAIN, [3]).regions
    assert region.nodes == (0, 1, 2) and region.inputs == (0,) and region.outputs == (3,)
    assert region.ended_by == END


def test_only_live_values_are_outputs() -> None:
    assert plan_of(CHAIN, [1, 3]).regions[0].outputs == (1, 3)


def test_what_nobody_sees_is_not_computed() -> None:
    assert nodes_of(plan_of(CHAIN, [1])) == [("xla", (0,))]
    assert plan_of(CHAIN, []).regions == ()


def test_what_is_waited_for_comes_first() -> None:
    """And the rest in a region of its own, with what it takes of the first: it runs while the value is sent."""
    rest = [node(k + 1, [k]) for k in range(1, 6)]  # 2, 3, 4, 5, 6 of 1
    nodes = [node(1, [0]), *rest[:3], node(10, [1]), node(11, [10]), *rest[3:]]
    first, second = plan_of(nodes, [6, 11], urgent=[11]).regions
    assert sorted(first.nodes) == [0, 4, 5] and set(first.outputs) == {1, 11}
    assert sorted(second.nodes) == [1, 2, 3, 6, 7] and second.inputs == (1,) and second.outputs == (6,)
    assert len(plan_of(nodes, [6, 11], urgent=[6]).regions) == 1  # of which too little is left
    assert len(plan_of(nodes, [6, 11]).regions) == 1


@pytest.mark.parametrize(
    "op",
    [aten.index_select.default, aten.floor_divide.default, aten.unsafe_chunk.default],
    ids=["an index", "a divisor", "nothing is known of it"],
)
def test_what_may_raise_is_computed_though_nobody_reads_the_result(op: Any) -> None:
    assert nodes_of(plan_of([node(2, [0, 1], op), node(3, [0])], [], inputs=(0, 1))) == [("xla", (0,))]


def test_an_island_parts_what_depends_on_it_and_nothing_else() -> None:
    nodes = [node(1, [0]), node(2, [1]), node(3, [2]), node(4, [0]), node(5, [4])]
    plan = plan_of(nodes, [3, 5], islands=[1])
    assert nodes_of(plan) == [("xla", (0, 3, 4)), ("aten", (1,)), ("xla", (2,))]
    assert plan.regions[0].ended_by.code == "region.island" and plan.regions[0].ended_by.detail == "a test"
    assert plan.regions[0].outputs == (1, 5), "the island's operand is handed to it"


def test_neighbouring_islands_share_a_region() -> None:
    assert nodes_of(plan_of(CHAIN, [3], islands=[0, 1, 2])) == [("aten", (0, 1, 2))]


def test_a_full_region_ends_with_its_reason() -> None:
    plan = plan_of(CHAIN, [3], cap=2)
    assert nodes_of(plan) == [("xla", (0, 1)), ("xla", (2,))]
    assert plan.regions[0].ended_by.code == "region.size"


def test_dying_inputs_are_donated_where_an_output_fits() -> None:
    assert plan_of(CHAIN, [3], donatable=[0]).regions[0].donated == (0,)
    assert plan_of(CHAIN, [3]).regions[0].donated == ()
    assert plan_of([node(1, [0], home=OTHER)], [1], donatable=[0]).regions[0].donated == ()
    two = [node(2, [0, 1])]
    assert plan_of(two, [2], inputs=(0, 1), donatable=[0, 1]).regions[0].donated == (0,)


def test_intermediates_between_regions_are_donated_after_their_last_use_alone() -> None:
    nodes = [node(1, [0]), node(2, [1]), node(3, [1, 2]), node(4, [3])]
    plan = plan_of(nodes, [4], cap=1)
    assert [r.donated for r in plan.regions] == [(), (), (0,), (0,)]
    assert plan.drops == ((0,), (), (1, 2), (3,))


def test_islands_get_no_donations() -> None:
    assert plan_of([node(1, [0])], [1], donatable=[0], islands=[0]).regions[0].donated == ()


def test_a_live_input_is_neither_donated_nor_dropped() -> None:
    plan = plan_of([node(1, [0])], [0, 1], donatable=[0])
    assert plan.regions[0].donated == () and plan.drops == ((),)


def test_plans_are_values() -> None:
    assert plan_of(CHAIN, [3]) == plan_of(CHAIN, [3])
    assert hash(plan_of(CHAIN, [3])) == hash(plan_of(CHAIN, [3]))
    assert "3 ops" in str(plan_of(CHAIN, [3]))


# ---- any stream ----------------------------------------------------------------------------------------------------


@st.composite
def streams(draw: Any) -> dict[str, Any]:
    """A random DAG: in-place results (`base`), several results, checked ops, islands, caps, donations, liveness."""
    inputs = draw(st.integers(1, 4))
    nodes, vids = [], inputs
    for _ in range(draw(st.integers(1, 14))):
        reads = draw(st.lists(st.integers(0, vids - 1), min_size=0, max_size=3))
        outputs = draw(st.integers(1, 2))
        base = draw(st.none() | st.integers(0, vids - 1))
        op = draw(st.sampled_from([aten.relu.default, aten.relu.default, aten.embedding.default]))
        home = draw(st.sampled_from([HOME, OTHER]))
        nodes.append(node(list(range(vids, vids + outputs)), reads, op, base=base, home=home))
        vids += outputs
    everything = st.integers(0, vids - 1)
    live = draw(st.frozensets(everything, max_size=5))
    return {
        "nodes": nodes,
        "inputs": tuple(range(inputs)),
        "live": live,
        "donatable": draw(st.frozensets(st.integers(0, inputs - 1))) - live,
        "islands": sorted(draw(st.frozensets(st.integers(0, len(nodes) - 1)))),
        "cap": draw(st.integers(1, 6)),
        "urgent": draw(st.frozensets(everything, max_size=2)),
    }


def execute(plan: Plan, nodes: Sequence[Node], inputs: Sequence[int]) -> set[int]:
    """Run a plan on value numbers alone, as `run` does; returns those that are there in the end."""
    values = set(inputs)
    for region, drops in zip(plan.regions, plan.drops, strict=True):
        assert set(region.inputs) <= values, "an input is not there"
        inside = set(region.inputs)
        for i in region.nodes:
            reads = {u.vid for u in nodes[i].uses} | {r.base for r in nodes[i].results if r.base is not None}
            assert reads <= inside, "an operand is not there"
            inside |= {r.vid for r in nodes[i].results}
        values -= {region.inputs[p] for p in region.donated}
        assert set(region.outputs) <= inside
        values |= set(region.outputs)
        assert set(drops) <= values | {region.inputs[p] for p in region.donated}
        values -= set(drops)
    return values


@given(streams())
@settings(max_examples=120, deadline=None)
def test_every_plan_is_valid_and_computes_what_lives(stream: dict[str, Any]) -> None:
    plan = plan_of(**stream)
    nodes, live = stream["nodes"], stream["live"]
    assert live <= execute(plan, nodes, stream["inputs"])
    for region in plan.regions:
        islands = set(region.nodes) & set(stream["islands"])
        assert islands == (set(region.nodes) if region.how == "aten" else set())
        assert region.how == "aten" or len(region.nodes) <= stream["cap"]
        assert region.how == "xla" or list(region.nodes) == sorted(region.nodes)
        assert not {region.inputs[p] for p in region.donated} & live


@given(streams())
@settings(max_examples=30, deadline=None)
def test_planning_is_deterministic(stream: dict[str, Any]) -> None:
    assert plan_of(**stream) == plan_of(**stream)


# ---- the validator -------------------------------------------------------------------------------------------------


def region(nodes: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], donated: Sequence[int] = ()) -> Region:
    return Region(tuple(nodes), tuple(inputs), tuple(outputs), tuple(donated), "xla", END)


BROKEN: dict[str, tuple[list[Region], list[Node], list[int]]] = {
    "a region waits for a later one": ([region([1], [1], [2]), region([0], [0], [1])], CHAIN[:2], [2]),
    "a node runs twice": ([region([0], [0], [1]), region([0], [0], [])], CHAIN[:1], [1]),
    "a live value is never handed out": ([region([0], [0], [])], CHAIN[:1], [1]),
    "a value that a later region reads is never handed out": (
        [region([0], [0], []), region([1], [1], [2])], CHAIN[:2], [2],
    ),
    "a value is handed out twice": ([region([0], [0], [1]), region([1], [1], [1, 2])], CHAIN[:2], [2]),
    "a region hands out what it does not have": ([region([0], [0], [1, 3])], CHAIN, [1]),
    "a donated value is read later": (
        [region([0], [0], [1], donated=[0]), region([1], [0], [2])], [node(1, [0]), node(2, [0])], [1, 2],
    ),
    "a donated value is live": ([region([0], [0], [1], donated=[0])], CHAIN[:1], [0, 1]),
    "operands come after their use within a region": ([region([1, 0], [0], [2])], CHAIN[:2], [2]),
    "an operand is neither an input nor computed": ([region([1], [], [2])], CHAIN[:2], [2]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_validator_refuses(name: str) -> None:
    regions, nodes, live = BROKEN[name]
    with pytest.raises(ValidationError):
        validate(Plan(tuple(regions), tuple(() for _ in regions)), nodes, frozenset(live))


def test_the_validator_refuses_that_a_value_is_dropped_too_early() -> None:
    regions = (region([0], [0], [1]), region([1], [0, 1], [2]))
    nodes = [node(1, [0]), node(2, [0, 1])]
    validate(Plan(regions, ((), (0, 1))), nodes, frozenset([2]))
    for drops in (((0,), (1,)), ((1,), (0,)), ((), (0, 1, 2))):
        with pytest.raises(ValidationError, match="dropped after region"):
            validate(Plan(regions, drops), nodes, frozenset([2]))


def test_the_validator_leaves_nothing_to_the_garbage_collector() -> None:
    regions = (region([0], [0], [1]), region([1], [1], [2]))
    plan = Plan(regions, ((), ()))
    gc.collect()
    gc.disable()
    try:
        validate(plan, CHAIN[:2], frozenset([1, 2]))
        assert gc.collect() == 0
    finally:
        gc.enable()


@given(streams(), st.data())
@settings(max_examples=80, deadline=None)
def test_the_validator_refuses_a_valid_plan_turned_round(stream: dict[str, Any], data: st.DataObject) -> None:
    plan = plan_of(**stream)
    makers = {v: g for g, r in enumerate(plan.regions) for v in r.outputs}
    needs = [(makers[v], g) for g, r in enumerate(plan.regions) for v in r.inputs if v in makers]
    if not needs:
        return
    first, second = data.draw(st.sampled_from(needs))
    order = list(range(len(plan.regions)))
    order[first], order[second] = order[second], order[first]
    turned = dataclasses.replace(
        plan, regions=tuple(plan.regions[i] for i in order), drops=tuple(plan.drops[i] for i in order)
    )
    with pytest.raises(ValidationError):
        validate(turned, stream["nodes"], stream["live"])


def test_memory_that_the_program_keeps_is_not_donated() -> None:
    given = Plan((region([0], [0], [1], donated=[0]),), ((),))
    validate(given, CHAIN[:1], frozenset([1]), frozenset([0]))
    with pytest.raises(ValidationError, match="whose memory the program keeps"):
        validate(given, CHAIN[:1], frozenset([1]), frozenset())
