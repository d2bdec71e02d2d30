"""Budget: thousands of small one-off forms are not compiled where the program waits, and the report says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.compiling import emit
from fused_eager.planning import budget
from fused_eager.planning.budget import (
    FEW,
    FORMS,
    HOPED,
    LONG,
    REGION,
    SPENT,
    TOGETHER,
    Lines,
    compiling,
    pays,
    seconds,
)
from fused_eager.planning.costs import COSTS, USUAL, seconds_of
from tests.streams import events, node

aten = torch.ops.aten
LARGE = (torch.float32, (1 << 22,))


def _various(count: int, home: Any = (torch.float32, (8,))) -> list[Any]:
    return [node(i + 1, [0], structure=i, home=home) for i in range(count)]


def lengths() -> torch.Tensor:
    """The beginnings of a tensor, one by one."""
    x = torch.arange(30.0)
    return torch.stack([x[:n].sum() for n in range(1, 31)])


def test_the_first_forms_of_a_line_cost_nothing() -> None:
    lines = Lines()
    assert lines.surplus(_various(FORMS)) == 0
    assert lines.surplus(_various(FORMS + 5)) == pytest.approx(5 * USUAL)
    assert lines.surplus(_various(FORMS)) == 0, "those that were among the first still are"


def test_many_lines_have_fewer_forms_each() -> None:
    """As op by op in a loop over shapes: a comparison of two tensors alone is twenty ops on as many lines."""
    lines = Lines()

    def compiled(line: int) -> int:
        found = 0
        for each in _various(FORMS):
            each.place = (lengths.__code__, line)
            found += lines.surplus([each]) == 0
        return found

    counts = [compiled(line) for line in range(20)]
    full = math.ceil(TOGETHER / (FORMS - FEW) / (USUAL + REGION))
    assert counts[: full - 1] == [FORMS] * (full - 1) and counts[full:] == [FEW] * (20 - full)


def test_a_model_on_a_new_line_is_no_loop_over_forms() -> None:
    """However many one-off forms a session has had: its layers come all at once, and again the next step."""
    lines = Lines()
    lines.further = TOGETHER
    model = _various(3 * FEW)
    for each in model:
        each.place = (lengths.__code__, 1)
    assert lines.pays(model, "model")
    assert lines.surplus(model) == 0


def test_small_ops_of_many_forms_pay_when_they_have_come_often_enough() -> None:
    nodes = _various(10)
    assert pays(nodes, 0.0) and not pays(nodes, 0.1)
    assert pays(nodes, 0.1, times=int(0.1 / seconds(nodes)) + 1)
    assert pays(_various(10, LARGE), 0.1), "large ops are worth it at once"


def test_a_stream_earns_its_compilation() -> None:
    lines = Lines()
    assert lines.pays(_various(FORMS), "first")
    further = _various(FORMS + 1)[-1:]
    came = 1
    while not lines.pays(further, "further"):
        came += 1
    assert came > HOPED
    assert not lines.pays(_various(FORMS + 2)[-1:], "another"), "each for itself"


def test_a_long_stream_of_small_ops_has_to_come_again() -> None:
    lines = Lines()
    long = _various(round(LONG / USUAL) + 1)
    for each in long:
        each.place = (lengths.__code__, each.number)  # each on a line of its own
    assert [lines.pays(long, "long") for _ in range(2)] == [False, True]


def test_what_takes_long_to_compile_costs_more() -> None:
    """A sort takes what seven sums of two tensors take; scatters, series and factorizations more."""
    few = round(LONG / seconds_of(aten.sort.default)) + 1
    sorts = [node(i + 1, [0], op=aten.sort.default, structure=i) for i in range(few)]
    for each in sorts:
        each.place = (lengths.__code__, each.number)
    lines = Lines()
    assert compiling(sorts) == pytest.approx(few * seconds_of(aten.sort.default))
    assert compiling([*sorts, *sorts]) == compiling(sorts), "a form that comes again is compiled once"
    assert [lines.pays(sorts, "sorts") for _ in range(2)] == [False, True]
    cheap = _various(few)
    for each in cheap:
        each.place = (lengths.__code__, each.number)
    assert Lines().pays(cheap, "cheap")
    for each in sorts:
        each.place = (lengths.__code__, 0)
    beyond = few - math.ceil(SPENT / seconds_of(aten.sort.default))
    assert Lines().surplus(sorts) == pytest.approx(beyond * seconds_of(aten.sort.default)), "all on one line"


def test_the_table_names_ops() -> None:
    names = [name for row in COSTS for name in row.ops.split()]
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(aten, name)]
    assert seconds_of(aten.scatter_.src) == seconds_of(aten.scatter.src) > seconds_of(aten.add.Tensor) == USUAL


@pytest.mark.parametrize(
    "options",
    [{"mode": "strict"}, {"mode": "debug"}, {"compile": "wait"}, {"compile": "blocking"}, {"deterministic": True}],
    ids=str,
)
def test_one_off_forms_are_not_compiled_and_the_report_says_so(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FORMS", 4)
    monkeypatch.setattr(budget, "LINES", Lines())
    monkeypatch.setattr(emit, "_numbers", {})  # plans that have been told
    expected = lengths()
    with events("compile", "plan") as seen, fused_eager(cache="off", native="measured", **options):
        assert torch.equal(lengths(), expected)
    assert sum(e.kind == "compile" for e in seen) < 12
    assert "region.budget" in str([e.data for e in seen])


def test_native_never_compiles_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FORMS", 4)
    with events("plan") as seen, fused_eager(cache="off", mode="strict", native="never"):
        x = torch.arange(12.0)
        assert [x[:n].sum().item() for n in (1, 4, 7, 12, 3, 9)] == [0, 6, 21, 66, 3, 36]
    assert "region.budget" not in str([e.data for e in seen])


def test_a_loop_of_writes_is_compiled_once_and_not_op_by_op() -> None:
    index, source = torch.tensor([0, 4, 2]), torch.ones(3, 5)
    expected = torch.zeros(10, 5)
    for _ in range(160):
        expected = expected.index_add(0, index, source)
    with events("compile") as seen, fused_eager(cache="off", compile="wait", native="never"):
        x = torch.zeros(10, 5)
        for _ in range(160):
            x = x.index_add(0, index, source)
        assert torch.equal(x, expected)
    assert max(e.data["ops"] for e in seen) <= 64
