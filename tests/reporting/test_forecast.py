"""A forecast adds up what the compiler says; each piece of advice finds its fault, and nothing where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fused_eager.cache import Key

from fused_eager.compiling.cross import Cost
from fused_eager.compiling.met import Met, Op
from fused_eager.reporting.cures import Cure, cures
from fused_eager.reporting.forecast import Alone, Forecast, Mode, come_late, of_mode, ops_alone, shared_out, steady
from fused_eager.reporting.forecast_views import as_html, as_text
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


def alone(op: str, *reads: Read, seconds: float = 1e-3, line: str = "x.py:7", precision: str = "highest") -> Alone:
    made = key(op, reads, precision)
    return Alone(Op(op, line), made.parts["region"]["nodes"][0], made, cost(seconds), 2)


def found(*rows: Alone, islands: Mapping[str, int] | None = None, late: Sequence[Met] = ()) -> list[Cure]:
    places = dict.fromkeys(islands or {}, "x.py:3")
    return cures(Forecast(V5E, [], islands=islands or {}, places=places, alone=list(rows), late=list(late)))


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def test_narrow_heads() -> None:
    (only,) = found(alone(ATTENTION, *[("bfloat16", (8, 16, 512, 64))] * 3))
    assert only.kind == "heads" and only.line == "x.py:7" and only.seconds == pytest.approx(1e-3)
    assert "16 heads of 64" in only.fault and "8 heads of 128" in only.cure
    assert found(alone(ATTENTION, *[("bfloat16", (8, 8, 512, 128))] * 3)) == []


def test_narrow_heads_of_attention_in_products() -> None:
    scores = alone("aten::bmm", ("bfloat16", (32, 512, 64)), ("bfloat16", (32, 64, 512)))
    mixed = alone("aten::bmm", ("bfloat16", (32, 512, 512)), ("bfloat16", (32, 512, 64)), line="x.py:8")
    assert [(cure.kind, cure.line) for cure in found(scores, mixed)] == [("heads", "x.py:7"), ("heads", "x.py:8")]
    assert "32 heads of 64" in found(scores)[0].fault and found(scores)[0].seconds == pytest.approx(1e-3)
    assert found(alone("aten::bmm", ("bfloat16", (32, 512, 128)), ("bfloat16", (32, 128, 512)))) == []


def test_sizes_that_pad_badly() -> None:
    (only,) = found(alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (136, 136))))
    assert only.kind == "padding" and "[136, 136] lies in memory as [144, 256], 2.0 times" in only.fault
    assert "128 instead of 136" in only.cure and only.seconds == pytest.approx(1e-3)
    (only,) = found(alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (65, 65))))
    assert "128 instead of 65 would take no more time" in only.cure and only.seconds == 0
    (only,) = found(alone("aten::mm", ("bfloat16", (3, 512)), ("bfloat16", (512, 128))))
    assert "16 instead of 3 would take no more time" in only.cure
    assert found(alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (512, 128)))) == []
    assert found(alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (512, 144)))) == []  # it lies by columns
    assert found(alone("aten::relu", ("bfloat16", (65, 65)))) == []  # no product


def product(*dtypes: str, flops: float, precision: str = "highest") -> Alone:
    reads = [(dtype, (128, 128)) for dtype in dtypes]
    made = key("aten::addmm", reads, precision)
    told = Cost(1e-3, 0, flops, 3e6, 0, 0, 0, 0)
    return Alone(Op("aten::addmm", "a.py:1"), made.parts["region"]["nodes"][0], made, told, 2)


@pytest.mark.parametrize(("precision", "passes"), [("highest", 6), ("high", 3)])
def test_float32_products_take_the_passes_that_the_compiler_does_not_count(precision: str, passes: int) -> None:
    full = V5E.chip.flops * 1e-3  # a millisecond's worth
    row = product("float32", "float32", flops=full, precision=precision)
    (only,) = found(row, alone("aten::relu", ("float32", (128, 128))))
    assert only.kind == "precision" and only.line == "a.py:1" and f"matrix unit {passes} times" in only.fault
    assert only.seconds == pytest.approx(2 * (passes - 1) * 1e-3)
    assert "set_float32_matmul_precision" in only.cure


def test_products_that_take_one_pass_or_wait_for_memory_anyway_have_nothing_to_gain() -> None:
    full = V5E.chip.flops * 1e-3
    assert found(product("bfloat16", "bfloat16", flops=full)) == []
    assert found(product("float32", "float32", flops=full, precision="medium")) == []
    assert found(product("float32", "float32", flops=full / 6)) == []


def test_rows_of_a_small_table() -> None:
    small = alone("aten::embedding", ("float32", (128, 768)), ("int64", (8, 1024)), seconds=378e-6)
    (only,) = found(small)
    assert only.kind == "lookup" and "8192 rows of a table of 128" in only.fault and "F.one_hot(ids, 128)" in only.cure
    assert 300e-6 * 2 < only.seconds < 378e-6 * 2
    large = alone("aten::embedding", ("float32", (50304, 768)), ("int64", (8, 1024)), seconds=376e-6)
    assert found(large) == []


def turned(line: str, stride: Sequence[int] | None, runs: int = 2) -> Alone:
    read: dict[str, Any] = {"dtype": "float32", "size": [8, 4, 64, 32]}
    node = {"op": "aten.clone.default", "reads": [{**read, "stride": list(stride)} if stride else read]}
    node["makes"] = [{"dtype": "float32", "size": [8, 4, 64, 32]}]
    made = Key({"region": {"nodes": [node]}, "numerics": {"float32_matmul_precision": "highest"}})
    return Alone(Op("aten::clone", line), made.parts["region"]["nodes"][0], made, cost(1e-3), runs)


def test_values_that_are_turned_again_and_again() -> None:
    (only,) = found(turned("x.py:7", (8192, 32, 128, 1)))
    assert only.kind == "layout" and only.seconds == pytest.approx(2e-3) and "2 times in a step" in only.fault
    assert found(turned("x.py:7", (8192, 32, 128, 1), runs=1)) == []  # once
    assert found(turned("x.py:7", None)) == []  # a copy in the order that it has
    assert found(turned("x.py:7", (0, 2048, 32, 1))) == []  # a row that is repeated


def summed(dtype: str, shape: Sequence[int], made_size: Sequence[int] = ()) -> Alone:
    node = {"op": "aten.sum.default", "reads": [{"dtype": dtype, "size": list(shape)}]}
    node["makes"] = [{"dtype": dtype, "size": list(made_size)}]
    made = Key({"region": {"nodes": [node]}, "numerics": {"float32_matmul_precision": "highest"}})
    return Alone(Op("aten::sum", "x.py:7"), made.parts["region"]["nodes"][0], made, cost(1e-3), 1)


def test_sums_of_bfloat16() -> None:
    (only,) = found(summed("bfloat16", (64, 512)))
    assert only.kind == "rounding" and "sum of 32768 numbers" in only.fault and only.seconds == 0
    assert found(summed("float32", (64, 512))) == found(summed("bfloat16", (8,))) == []
    assert found(summed("bfloat16", (64, 512), (512,))) == []  # a gradient, as everybody's


def test_islands_and_regions_that_come_anew() -> None:
    some = found(alone("aten::relu"), islands={"aten::nonzero": 6}, late=[met("a", {5: 1})])
    assert {cure.kind for cure in some} == {"island", "recompiles"}
    (island,) = [cure for cure in some if cure.kind == "island"]
    assert "aten::nonzero" in island.fault and "6 times" in island.fault and island.line == "x.py:3"


def test_findings_of_one_kind_on_one_line_are_one_and_small_ones_are_left_out() -> None:
    row = alone("aten::mm", ("bfloat16", (512, 512)), ("bfloat16", (136, 136)))
    (both,) = found(row, row)
    assert both.seconds == pytest.approx(2 * found(row)[0].seconds)
    assert found(alone("aten::relu", seconds=1.0), row) == []


def test_names_of_ops() -> None:
    assert [alone(op).base for op in ("aten::mm", "aten.addmm.default", "aten::add_.Tensor")] == ["mm", "addmm", "add"]


MODES = [Mode(name, 2e-3, 4, 12, 1e9, 1e6, 1 << 30) for name in ("strict", "fused", "whole")]


def test_it_is_told_with_what_the_figures_are_worth() -> None:
    made = Forecast(V5E, MODES, {"x.py:1": 2e-3}, {"Net.a": 1e-3, "Net.b": 1e-3})
    text = as_text(made, [Cure("heads", "x.py:7", "too narrow", "wider", 1e-3)], {"5 ops": "XLA: no"})
    assert "as XLA's compiler expects it" in text and "2 ms" in text and "Net.a" in text
    assert "gains about 1 ms" in text and "5 ops: XLA: no" in text and "one pass" not in text
    assert "Nothing was found" in as_text(made, [], {})
    made.alone = [product("float32", "float32", flops=V5E.chip.flops * 1e-3)]
    assert "make more, in every mode: 10 ms that are not in it" in as_text(made, [], {})


def test_the_page_has_what_the_text_has_and_shows_what_a_program_says_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("y = a < b\n")
    made = Forecast(V5E, MODES, {f"{tmp_path}/x.py:1": 2e-3}, {"Net.a": 1e-3})
    cure = Cure("heads", f"{tmp_path}/x.py:1", "<narrow>", "wider", 1e-3)
    page = as_html("train.py --x <1>", made, [cure], {"5 ops": "XLA: no"})
    assert page.lstrip().startswith("<!doctype html>") and "http" not in page
    assert "train.py --x &lt;1&gt;" in page and "y = a &lt; b" in page and "&lt;narrow&gt;" in page
    assert "forecasts of XLA" in page and "one op at a time" in page and "Net.a" in page and "XLA: no" in page
    assert ".fe .card" in page  # the report's style
    assert "Nothing was found" in as_html("x", made, [], {})
