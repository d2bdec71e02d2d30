"""A forecast adds up what the compiler says; each piece of advice finds its fault, and nothing where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fused_eager.cache import Key

from fused_eager.commands.forecasting import told
from fused_eager.compiling.cross import Cost
from fused_eager.compiling.met import Met, Op
from fused_eager.reporting.cures import Cure, base, cures
from fused_eager.reporting.forecast import Alone, Forecast, Mode, come_late, of_mode, ops_alone, shared_out, steady
from fused_eager.targets.target import Target

V5E = Target.parse("v5e:1")
Read = tuple[str, Sequence[int]]


def cost(seconds: float, unjudged: int = 0, memory: int = 0) -> Cost:
    return Cost(seconds, unjudged, 2e6, 3e6, memory, 0, 0, 0)


def key(op: str, reads: Sequence[Read] = (), precision: str = "highest") -> Key:
    node = {"op": op, "reads": [{"dtype": dtype, "size": list(size)} for dtype, size in reads]}
    return Key({"region": {"nodes": [node]}, "numerics": {"float32_matmul_precision": precision}})


def met(name: str, runs: Mapping[int, int], *ops: Op, beside: int = 0) -> Met:
    return Met(key(name), name, list(ops) or [Op(name, "x.py:1")], Counter(runs), beside)


def test_the_last_whole_step_is_added_up() -> None:
    first, each, last = met("a", {0: 5}), met("b", {0: 1, 1: 2, 2: 3}, beside=50), met("c", {2: 1})
    costs = {first.key: cost(9.0), each.key: cost(1e-3, 1, memory=7)}
    assert {m.name for m, _ in steady([first, each, last], 3).values()} == {"b", "c"}
    mode = of_mode("fused", [first, each, last], 3, costs)  # type: ignore[arg-type]
    assert (mode.seconds, mode.unjudged, mode.launches, mode.failed) == (pytest.approx(3e-3), 3, 4, 1)
    assert (mode.flops, mode.bytes, mode.memory) == (6e6, 9e6, 57)
    assert mode.share(V5E) == pytest.approx(6e6 / 3e-3 / 197e12)


def test_a_program_without_steps_is_added_up_whole() -> None:
    only = met("a", {0: 5})
    assert of_mode("strict", [only], 0, {only.key: cost(1e-3)}).launches == 5  # type: ignore[dict-item]


def test_a_region_is_shared_out_as_its_ops_alone_are() -> None:
    slow, quick = Op("aten::mm", "x.py:1", "Net.a"), Op("aten::relu", "x.py:2", "Net.b")
    strict = [met("mm", {2: 1}, slow), met("relu", {2: 1}, quick)]
    fused = met("both", {2: 2}, slow, quick)
    costs: Any = {strict[0].key: cost(3e-3), strict[1].key: cost(1e-3), fused.key: cost(2e-3)}
    alone = ops_alone(strict, 3, costs)
    assert [row.seconds for row in alone] == [3e-3, 1e-3]
    lines = shared_out([fused], 3, costs, alone, lambda op: op.line)
    assert lines == {"x.py:1": pytest.approx(3e-3), "x.py:2": pytest.approx(1e-3)}
    assert shared_out([fused], 3, costs, alone, lambda op: op.module)["Net.a"] == pytest.approx(3e-3)


def test_regions_that_come_again_with_other_shapes_are_late_and_new_ones_are_not() -> None:
    early, late, new = met("a", {0: 1, 1: 1}), met("b", {2: 1}), met("c", {2: 1}, Op("aten::new", "x.py:9"))
    late.ops = early.ops
    assert come_late([early, late, new], 3) == [late]


# ---- cures -------------------------------------------------------------------------------------------------------


def alone(op: str, *reads: Read, seconds: float = 1e-3, line: str = "x.py:7", **key_parts: str) -> Alone:
    made = key(op, reads, **key_parts)
    return Alone(Op(op, line), made.parts["region"]["nodes"][0], made, cost(seconds), 2)


def half(rows: Sequence[Alone], precision: str) -> dict[Key, float]:
    assert precision == "medium"
    return {row.key: row.cost.seconds / 2 for row in rows}


def found(*rows: Alone, islands: Mapping[str, int] | None = None, late: Sequence[Met] = ()) -> list[Cure]:
    return cures(Forecast(V5E, [], islands=islands or {}, alone=list(rows), late=list(late)), half)


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def test_narrow_heads() -> None:
    (only,) = found(alone(ATTENTION, *[("bfloat16", (8, 16, 512, 64))] * 3))
    assert only.kind == "heads" and only.line == "x.py:7" and only.seconds == pytest.approx(1e-3)
    assert "16 heads of 64" in only.fault and "8 heads of 128" in only.cure
    assert found(alone(ATTENTION, *[("bfloat16", (8, 8, 512, 128))] * 3)) == []


def test_sizes_that_pad_badly() -> None:
    (only,) = found(alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (512, 65))))
    assert only.kind == "padding" and "[512, 65] lies in memory as [512, 128]" in only.fault
    assert "65 -> 128" in only.cure and 0.9e-3 < only.seconds < 1e-3
    assert found(alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (512, 128)))) == []
    assert found(alone("aten::relu", ("bfloat16", (512, 65)))) == []  # no product


def test_float32_products_gain_what_the_compiler_says() -> None:
    rows = [alone("aten::addmm", ("float32", (128,)), ("float32", (128, 128)), ("float32", (128, 128)), line="a.py:1")]
    (only,) = found(*rows, alone("aten::relu", ("float32", (128, 128))))
    assert only.kind == "precision" and only.seconds == pytest.approx(1e-3) and only.line == "a.py:1"
    assert "set_float32_matmul_precision" in only.cure
    assert found(alone("aten::mm", *[("bfloat16", (128, 128))] * 2)) == []
    assert found(alone("aten::mm", *[("float32", (128, 128))] * 2, precision="medium")) == []


def test_float32_products_that_would_gain_nothing_are_no_fault() -> None:
    row = alone("aten::mm", *[("float32", (128, 128))] * 2)
    assert cures(Forecast(V5E, [], alone=[row]), lambda rows, precision: {row.key: row.cost.seconds}) == []


def test_islands_and_regions_that_come_anew() -> None:
    some = found(alone("aten::relu"), islands={"aten::nonzero": 6}, late=[met("a", {5: 1})])
    assert {cure.kind for cure in some} == {"island", "recompiles"}
    assert any("aten::nonzero" in cure.fault and "6 times" in cure.fault for cure in some)


def test_findings_of_one_kind_on_one_line_are_one_and_small_ones_are_left_out() -> None:
    row = alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (512, 65)))
    (both,) = found(row, row)
    assert both.seconds == pytest.approx(2 * found(row)[0].seconds)
    assert found(alone("aten::relu", seconds=1.0), row) == []


def test_names_of_ops() -> None:
    assert [base(op) for op in ("aten::mm", "aten.addmm.default", "aten::add_.Tensor")] == ["mm", "addmm", "add"]


def test_it_is_told_with_what_the_figures_are_worth() -> None:
    modes = [Mode(name, 2e-3, 4, 12, 1e9, 1e6, 1 << 30) for name in ("strict", "fused", "whole")]
    made = Forecast(V5E, modes, {"x.py:1": 2e-3}, {"Net.a": 1e-3, "Net.b": 1e-3})
    text = told(made, [Cure("heads", "x.py:7", "too narrow", "wider", 1e-3)], {"5 ops": "XLA: no"})
    assert "as XLA's compiler expects it" in text and "2 ms" in text and "Net.a" in text
    assert "gains about 1 ms" in text and "5 ops: XLA: no" in text
    assert "Nothing was found" in told(made, [], {})
