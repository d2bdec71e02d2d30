"""Models under `torch.compile(backend="fused_eager")` compute what they do in plain PyTorch, in as many graphs as
Dynamo makes of them; in a second process nothing is compiled."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from .compiled import BEGIN, END, SUITES, WAYS, Results, Way, apart, expected, faults, found, table, write
from .running import beside

# Each by parts, for no test may take ten minutes.
PARTS = [(suite, f"{k}/{n}") for suite, n in zip(SUITES, (6, 4, 2), strict=True) for k in range(n)]
NEEDS = {"transformers": "transformers", "timm": "timm"}


def _missing(suite: str) -> str:
    absent = [suite] if suite in NEEDS and importlib.util.find_spec(NEEDS[suite]) is None else []
    absent += ["torchvision"] if suite == "timm" and not (beside("torchvision") / "torchvision").is_dir() else []
    return f"{', '.join(absent)} not installed; make test-clients installs it" if absent else ""


@cache
def folder(suite: str, part: str) -> Path:
    return Path(mkdtemp(prefix="fused-eager-compiled-"))


@cache
def wanted(suite: str, part: str, sizes: str) -> Results:
    return expected(folder(suite, part), sizes, ("--suites", suite, "--part", part))


@cache
def outcome(suite: str, part: str, name: str) -> Results:
    if WAYS[name].warm:
        outcome(suite, part, "default")
    which = ("--suites", suite, "--part", part)
    return found(folder(suite, part), WAYS[name], which, wanted(suite, part, WAYS[name].sizes))


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("suite", "part"), PARTS)
def test_compiled_models_train_and_answer_as_in_plain_pytorch(suite: str, part: str, name: str) -> None:
    if _missing(suite):
        pytest.skip(_missing(suite))
    way = WAYS[name]
    plain = wanted(suite, part, way.sizes)
    said = {model: faults(way, plain[model], its) for model, its in outcome(suite, part, name).items()}
    assert {model: why for model, why in said.items() if why} == {}
    assert len(said) == len(plain) > 1


def result(**more: Any) -> dict[str, Any]:
    kept = {"losses": [2.0, 1.0], "outputs": torch.ones(3), "breaks": 1, "islands": ["aten.sort.default"], "events": {}}
    return {**kept, **more}


def test_faults_are_found(tmp_path: Path) -> None:
    cold, warm = Way(), Way(warm=True)
    assert faults(cold, result(), result(events={"compile": 2}, breaks=0)) == []
    assert faults(warm, result(), result(events={"compile": 2})) == ["2 regions were compiled again"]
    assert faults(cold, result(), result(breaks=2)) == ["2 graph breaks, not 1"]
    assert faults(cold, result(), result(losses=[2.0, 1.1])) == ["/losses[1]: 1.1, not 1.0"]
    assert faults(cold, result(), {"error": "ValueError: no\nmore"}) == ["ValueError: no"]
    assert apart(result(), result(losses=[2.0, 1.5], outputs=torch.ones(3) * 1.1)) == 0.25
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, table({"2,2,2": {"a": result()}}, {"default": {"a": result()}}))
    assert "| a | equal | 0e+00 | 1 (1) | `aten.sort` |" in page.read_text()
    assert "old" not in page.read_text() and page.read_text().endswith("\nafter\n")
