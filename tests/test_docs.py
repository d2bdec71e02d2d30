"""The documentation is executed: what it shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATED = ("event_log.md", "options.md", "ops.md", "reasons.md", "platforms.md", "tpu_ops.md", "clients.md")
PAGES = sorted(page for page in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")) if page.name not in GENERATED)


TRIED = """
import doctest, sys
print(*doctest.testfile(
    sys.argv[1], module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
))
"""


@pytest.mark.parametrize("page", ["walkthrough.md", "report.md"])
def test_examples_of_a_page_give_what_it_shows(page: str) -> None:
    """In a process of its own: what a page says about compiling depends on what was compiled before."""
    done = subprocess.run([sys.executable, "-c", TRIED, str(DOCS / page)], capture_output=True, text=True, timeout=300)
    failed, tried = map(int, done.stdout.split("\n")[-2].split())
    assert tried > 10
    assert failed == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_short(page: Path) -> None:
    """Not those of tables and images, which cannot be broken, nor of what programs print."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert [line for line in prose.split("\n") if len(line) > 120 and not re.match(r"\||!\[|    ", line)] == []


def test_the_readme_and_the_glossary_stay_short() -> None:
    """What more there is to say belongs on a page of its own; a word that one page needs is explained there."""
    assert (ROOT / "README.md").read_text().count("\n") < 120
    words = re.findall(r"^\| (?!word )[^|]+\|", (DOCS / "glossary.md").read_text(), re.M)
    assert 10 < len(words) <= 25
