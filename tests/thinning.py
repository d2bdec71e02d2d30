"""Thinning: of a test's parameters that are many, some are for every change, and the rest for the full run."""

from __future__ import annotations

from collections import Counter

import pytest


def thin(items: list[pytest.Item]) -> None:
    """Leave most of what is marked `thinned(n)` to the full run: all but one in n."""
    seen: Counter[str] = Counter()
    for item in items:
        thinned, test = item.get_closest_marker("thinned"), item.nodeid.partition("[")[0]
        # By a step that is no fraction: each n-th could be of one dtype all along.
        if thinned is not None and seen[test] * 0.618034 % 1 >= 1 / thinned.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
