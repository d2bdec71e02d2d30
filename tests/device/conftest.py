"""Tests on tensors of the device: they need a process that has it, and options that its starter chooses
(`tests/test_device.py`), so that the rest of the tests' settings is not for them."""

from __future__ import annotations

import os
from collections import Counter

import pytest

if os.environ.get("TESTS_ON_DEVICE"):
    import fused_eager.tpu  # noqa: F401 - registers the device
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of what is `thinned` to the full run."""
    if not os.environ.get("TESTS_ON_DEVICE"):
        return
    seen: Counter[str] = Counter()
    for item in items:
        thinned, test = item.get_closest_marker("thinned"), item.nodeid.partition("[")[0]
        if thinned is not None and seen[test] * 0.618034 % 1 >= 1 / thinned.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
