"""The documentation is executed: what it shows is what happens."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["walkthrough.md", "report.md"])
def test_examples_of_a_page_give_what_it_shows(page: str) -> None:
    failed, tried = doctest.testfile(
        str(DOCS / page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    assert tried > 10
    assert failed == 0
