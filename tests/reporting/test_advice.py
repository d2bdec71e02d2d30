"""Advice from logs made by hand; whole programs are in test_gallery."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_eager.log.reasons import OUTSIDE
from fused_eager.reporting.advice import WAITS, Advice
from fused_eager.reporting.source import short, shorten, split, statement

from .logs import Log


def only(log: Log) -> Advice:
    found = log.report.advice
    assert len(found) == 1, found
    return found[0]


def loop(rounds: int = 10) -> Log:
    log = Log()
    log.compile(1)
    log.plan(1)
    for _ in range(rounds):
        log.flush("cut.optimizer")
    return log


@pytest.mark.parametrize(
    ("source", "detail", "kind"),
    [
        ("print(loss)", "Tensor.__repr__", "wait.print"),
        ('log(f"{loss:.3f}")', "aten._local_scalar_dense.default", "wait.print"),
        ("if loss > 3:", "aten._local_scalar_dense.default", "wait.branch"),
        ("while error > 1e-3:", "aten._local_scalar_dense.default", "wait.branch"),
        ("if loss.item() > 3:", "aten._local_scalar_dense.default", "wait.item"),
        ("y = float(loss)", "aten._local_scalar_dense.default", "wait.item"),
        ("a = x.numpy()", "Tensor.numpy", "wait.numpy"),
        ("a = np.asarray(x)", "Tensor.__array__", "wait.numpy"),
        ("foo(x)", "Tensor.data_ptr", "wait.value"),
    ],
)
def test_each_form_of_waiting_has_its_cure(tmp_path: Path, source: str, detail: str, kind: str) -> None:
    file = tmp_path / "p.py"
    file.write_text(source + "\n")
    log = loop()
    for _ in range(10):
        log.flush("cut.optimizer")
        log.sync("sync.memory" if "Tensor." in detail else "sync.value", f"{file}:1", detail=detail)
    found = only(log)
    assert found.kind == kind and found.source == source
    assert found.cure == next(w.cure for w in WAITS if f"wait.{w.kind}" == kind)
    assert found.seconds == pytest.approx(0.01) and "10 waits, 0.5 per step" in found.evidence


def test_rare_and_short_waits_are_none() -> None:
    log = loop(100)
    for _ in range(3):
        log.sync(seconds=1e-6)
    assert log.report.advice == ()


def test_rare_and_long_waits_are_some() -> None:
    log = loop(100)
    for _ in range(3):
        log.flush("cut.optimizer")
        log.at += 0.1
        log.sync(seconds=0.1)
    assert only(log).kind == "wait.value"


def test_reading_values_after_the_loop_is_what_one_should_do() -> None:
    log = loop()
    for _ in range(10):
        log.sync(seconds=1e-6)
    assert log.report.advice == ()


def test_drawing_from_a_computed_distribution() -> None:
    log = loop()
    for _ in range(10):
        log.flush("sync.island")
        log.sync("sync.island", detail="aten.multinomial.default draws random numbers")
    assert only(log).kind == "wait.random" and "torch.rand" in only(log).cure


def test_what_costs_most_comes_first() -> None:
    log = loop()
    for _ in range(10):
        log.flush("cut.optimizer")
        log.sync(site="a.py:1", seconds=0.001)
        log.sync(site="a.py:2", seconds=0.009)
    assert [a.site for a in log.report.advice] == ["a.py:2", "a.py:1"]


def recompiled(sizes: list[int], runs: int, first: int = 10, name: str = "shape[0] of input 1") -> Log:
    """One shape that ran `first` times, and further sizes that ran `runs` times each."""
    log = loop(first)
    for number, (before, now) in enumerate(zip(sizes, sizes[1:], strict=False), 2):
        log.compile(number, "shape", changes=[[name, before, now]], variant=number, why=f"{before} -> {now}")
        log.plan(number)
        for _ in range(runs):
            log.flush("cut.optimizer", plan=number)
    return log


@pytest.mark.parametrize(
    ("sizes", "runs", "kind"),
    [
        ([32, 10], 1, "shape.last"),
        ([4, 5, 6, 7], 1, "shape.growing"),
        ([7, 6, 5], 1, "shape.growing"),
        ([4, 5, 6, 7], 5, "shape.changing"),
        ([32, 64], 8, "shape.changing"),
        ([5, 9, 3], 1, "shape.changing"),
    ],
)
def test_forms_of_changing_shapes(sizes: list[int], runs: int, kind: str) -> None:
    found = only(recompiled(sizes, runs))
    assert found.kind == kind
    assert found.seconds == pytest.approx(0.5 * (len(sizes) - 1))
    assert f"{sizes[-2]} -> {sizes[-1]}" in found.evidence


def test_lengths_that_one_executable_does_for_are_no_mistake() -> None:
    log = recompiled([4, 5, 6, 7], 1)
    log.tell("lengths", site="a.py:1", ops=3, rows=1024, why="")
    assert not [a for a in log.report.advice if a.kind.startswith("shape")]
    log.plan(7, ("a.py:1", "", False, {"aten.add.Tensor": 3}), how="aten", ended_by="region.unstable", site="a.py:1")
    for _ in range(50):  # too short for it
        log.flush("cut.optimizer", plan=7, seconds=0.2)
    assert [a for a in log.report.advice if a.kind.startswith("shape")]


def test_layers_of_two_sizes_in_one_round_are_no_mistake() -> None:
    log = Log()
    for number, more in ((1, {}), (2, {"cause": "shape", "changes": [["shape[0] of input 0", 4, 8]]})):
        log.compile(number, **more)
        log.plan(number)
    for _ in range(10):
        log.flush("cut.optimizer", plan=1)
        log.flush("cut.backward", plan=2)
    assert log.report.advice == ()


def test_a_first_round_that_differs_is_no_mistake() -> None:
    log = loop()
    log.compile(2, "ops")
    log.compile(3, "liveness")
    assert log.report.advice == ()


@pytest.mark.parametrize(
    ("cause", "times"), [("dtype", 1), ("argument", 1), ("liveness", 2), ("ops", 3), ("layout", 2)]
)
def test_other_causes_have_a_cure_each(cause: str, times: int) -> None:
    log = loop()
    for number in range(2, 2 + times):
        log.compile(number, cause, changes=[["x", 1, 2]])
    assert only(log).kind == f"compile.{cause}" and only(log).cure


def test_islands_count_with_what_they_hold_up() -> None:
    log = loop()
    log.island()
    log.plan(7, ("a.py:3", "", False, {"aten.sort.default": 1}), how="aten", ended_by="region.island")
    for _ in range(5):
        log.flush(plan=7, seconds=0.2)
    found = only(log)
    assert (found.kind, found.site) == ("island", "a.py:3") and found.seconds == pytest.approx(1.0)
    assert "no lowering" in found.evidence


def test_a_mode_around_the_context_is_one_thing_to_change() -> None:
    log = loop()
    for op, line in (("aten.mm.default", "a.py:3"), ("aten.tanh.default", "a.py:4"), ("aten.mm.default", "a.py:3")):
        log.island(op, line, f"FlopCounterMode {OUTSIDE}")
    found = only(log)
    assert (found.kind, found.site) == ("outside", "a.py:3") and "FlopCounterMode" in found.title
    assert "inside the context" in found.cure and found.evidence.startswith("3 ops")


def test_streams_that_are_not_worth_compiling() -> None:
    log = loop()
    log.plan(7, ("a.py:8", "", False, {"aten.add.Tensor": 3}), how="aten", ended_by="region.unstable", site="a.py:8")
    for _ in range(5):
        log.flush(plan=7, seconds=0.2)
    assert (only(log).kind, only(log).site) == ("shape.unstable", "a.py:8")
    log.tell("lengths", site="a.py:8", ops=3, rows=0, why="rows depend on each other (sort)")
    assert only(log).evidence.endswith("one executable does not do for all: rows depend on each other (sort)")


def test_a_failed_compilation_is_told_with_xlas_words() -> None:
    log = loop()
    log.tell("compile-failed", ops=4, error="XlaRuntimeError: no", site="a.py:4")
    assert only(log).kind == "compile-failed" and "XlaRuntimeError" in only(log).evidence


def test_a_wrong_result_comes_before_all_else() -> None:
    log = loop()
    for _ in range(10):
        log.flush("cut.optimizer")
        log.sync(seconds=5.0)
    log.tell("mismatch", op="aten.foo.default", site="a.py:9", difference="1 of 3 differ", alone=True, script="x.py")
    report = log.report
    assert [a.kind for a in report.advice] == ["mismatch", "wait.value"]
    assert "x.py" in report.advice[0].cure and "a.py:9  wrong: aten.foo.default" in str(report)
    assert "wrong" in report.html()


def test_names_of_sites(tmp_path: Path) -> None:
    assert split("/a/b.py:12") == ("/a/b.py", 12) and split("?:0")[1] == 0 and split("nonsense") == ("?", 0)
    assert short(f"{Path.cwd()}/x/y.py:3") == "x/y.py:3"
    assert short("/far/away/pack/mod.py:3") == "pack/mod.py:3"
    assert shorten("at /far/away/pack/mod.py:3", ["/far/away/pack/mod.py:3"]) == "at pack/mod.py:3"
    file = tmp_path / "p.py"
    file.write_text("f(a,\n  b)\nc = 1\n")
    assert statement(f"{file}:1") == "f(a, b)" and statement(f"{file}:3") == "c = 1"
