"""Thinning: of a test's parameters that are many, some are for every change, and the rest for the full run."""

from __future__ import annotations

from collections import Counter

import pytest

# Of the rows' tests each parameter compiles something: of those with many, one in two. The corpus has each op as well.
ROWS, MANY = "tests/fusion_rules/", 6


def thin(items: list[pytest.Item]) -> None:
    """Leave most of what is marked `thinned(n)` to the full run: all but one in n."""
    tests = Counter(_test(item) for item in items)
    seen: Counter[str] = Counter()
    for item in items:
        thinned, test = item.get_closest_marker("thinned"), _test(item)
        many = test.startswith(ROWS) and tests[test] >= MANY
        part = thinned.args[0] if thinned is not None else 2 if many else 1
        # By a step that is no fraction: each n-th could be of one dtype all along.
        if seen[test] * 0.618034 % 1 >= 1 / part:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
