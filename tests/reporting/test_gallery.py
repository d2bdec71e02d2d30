"""The gallery: programs with one mistake each. The report's first advice names the right line and the right cure."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from fused_eager import fused_eager
from fused_eager.compiling import background, causes, emit
from fused_eager.executing import load
from fused_eager.reporting.advice import advise
from fused_eager.reporting.explaining import _with_plans
from fused_eager.reporting.facts import add_up
from fused_eager.reporting.report import Report
from fused_eager.tracing import trace
from tests.streams import events, stable_shapes

FOLDER = Path(__file__).parent.parent.parent / "examples" / "gallery"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))

# program -> the kind of the first advice, and words that its cure must have
EXPECTED = {
    "alternating_shapes": ("shape.changing", "pad to"),
    "branch_on_value": ("wait.branch", "torch.where"),
    "float_in_shape": ("shape.changing", "if a Python number decides the size"),
    "growing_cache": ("shape.growing", "allocate the full size once"),
    "missing_lowering": ("island", "ops that have a lowering"),
    "numpy_in_loop": ("wait.numpy", "convert once after"),
    "odd_last_batch": ("shape.last", "drop_last=True"),
    "print_the_loss": ("wait.print", "print less often"),
    "rebuilt_module": ("rebuilt", "build it once before the loop"),
    "sync_per_step": ("wait.item", "read them once after the loop"),
}


def run(program: str, compiling: str, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report of a program of the gallery, as of a process of its own."""
    background.wait()
    background.FORMS.clear()
    load.forget()
    monkeypatch.setattr(trace.MEMORY, "root", trace._root())
    monkeypatch.setattr(load, "ISLANDS", {})
    monkeypatch.setattr(causes, "MEMORY", causes.Memory())
    monkeypatch.setattr(causes, "CAME", causes.Memory())
    monkeypatch.setattr(emit._thread, "ended", None)
    with stable_shapes(), events() as seen, fused_eager(cache="off", compile=compiling):
        runpy.run_path(str(FOLDER / f"{program}.py"), run_name="__main__")
        background.wait()
    return Report.of([_with_plans(seen, seen[0].time)])


def marked(program: str) -> int:
    lines = (FOLDER / f"{program}.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# <-"))


def test_the_gallery_is_complete() -> None:
    assert set(PROGRAMS) == set(EXPECTED) and len(PROGRAMS) == 10


@pytest.mark.thinned(2)
@pytest.mark.parametrize("compiling", [pytest.param("wait", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_first_advice_is_the_right_one(program: str, compiling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, cure = EXPECTED[program]
    report = run(program, compiling, monkeypatch)
    first = report.advice[0]
    assert first.kind == kind, str(report)
    assert first.site == f"{FOLDER / program}.py:{marked(program)}", str(report)
    assert cure in first.cure
    assert first.source.endswith("# <-")


def test_a_program_without_mistake_gets_no_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = (FOLDER / "sync_per_step.py").read_text().replace("running += loss.item()", "running += loss.detach()")
    (tmp_path / "good.py").write_text(source.replace("running = 0.0", "running = torch.zeros(())"))
    monkeypatch.setitem(globals(), "FOLDER", tmp_path)
    report = run("good", "wait", monkeypatch)
    assert report.advice == (), str(report)
    assert advise(add_up(report.processes)) == []
