"""The documentation is executed: what it shows is what happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


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
