"""Thinning: of a test's parameters that are many, some are for every change, and the rest for the full run."""

from __future__ import annotations

from collections import Counter

import pytest

# In a folder: from how many parameters on a test is thinned, and to one in how many. Each of the rows' compiles
# something, and the corpus has each op as well.
FOLDERS = {"tests/fusion_rules/": (6, 3), "tests/semantics/": (12, 2)}


def thin(items: list[pytest.Item]) -> None:
    """Leave most of what is marked `thinned(n)`, or is of such a folder, to the full run: all but one in n."""
    tests = Counter(_test(item) for item in items)
    seen: Counter[str] = Counter()
    for item in items:
        thinned, test = item.get_closest_marker("thinned"), _test(item)
        part = thinned.args[0] if thinned is not None else _of_folder(test, tests[test])
        # By a step that is no fraction: each n-th could be of one dtype all along.
        if seen[test] * 0.618034 % 1 >= 1 / part:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


def _of_folder(test: str, parameters: int) -> int:
    return next((n for folder, (many, n) in FOLDERS.items() if test.startswith(folder) and parameters >= many), 1)


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
