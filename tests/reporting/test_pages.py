"""The pages made from tables are up to date, and every code that the package uses is in the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_eager import IslandRefused, fused_eager
from fused_eager.log.reasons import CODES
from fused_eager.reporting.pages import PAGES, main
from fused_eager.reporting.schema import KINDS

ROOT = Path(__file__).parent.parent.parent
SOURCES = [p for folder in ("fused_eager", "fusion_rules") for p in (ROOT / folder).rglob("*.py")]
FAMILIES = {name.partition(".")[0] for name in CODES}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_page_is_up_to_date(page: str) -> None:
    assert (ROOT / "docs" / page).read_text() == PAGES[page](), "run: python -m fused_eager.reporting.pages"


def test_the_pages_are_written_where_they_are_told(tmp_path: Path) -> None:
    assert main(tmp_path) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(PAGES)


def literals() -> set[str]:
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_code_that_is_used_is_registered_and_the_other_way_round() -> None:
    used = {text for text in literals() if re.fullmatch(rf"({'|'.join(FAMILIES)})\.[a-z]+", text)}
    used = {text for text in used if not text.endswith(".default")}  # an op's overload
    assert used <= set(CODES), used - set(CODES)
    calls = [ast.unparse(node) for path in SOURCES if path.name != "reasons.py"
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]  # fmt: skip
    unused = {code for code in CODES if repr(code) not in calls}
    assert not unused, f"nobody gives the reason {unused}: take the rows out"


def test_every_kind_of_event_that_is_told_is_documented() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    first = [node.args[0] for node in nodes if ast.unparse(node.func) == "LOG.emit"]
    told = {str(argument.value) for argument in first if isinstance(argument, ast.Constant)}
    assert len(told) > 10
    assert told - set(KINDS) - {kind for kind in told if kind.startswith("cache-")} == set()


@pytest.mark.parametrize("code", CODES.values(), ids=lambda c: c.name)
def test_examples_are_python_and_differ_from_their_cure(code: object) -> None:
    row = CODES[code.name]  # type: ignore[attr-defined]
    ast.parse(row.example)
    ast.parse(row.cured)
    assert row.example != row.cured


def test_the_cure_for_an_island_gives_the_same_without_one() -> None:
    a, row = torch.rand(3, 3, dtype=torch.float64), CODES["region.island"]

    def run(program: str) -> float:
        found: dict[str, Any] = {"torch": torch, "a": a}
        exec(program, found)
        return float(found["y"])

    with fused_eager(islands="refuse"):
        with pytest.raises(IslandRefused):
            run(row.example)
        cured = run(row.cured)
    assert cured == pytest.approx(run(row.example))
