"""Tests on tensors of the device: they need a process that has it, and options that its starter chooses
(`tests/test_device.py`), so that the rest of the tests' settings is not for them."""

from __future__ import annotations

import os

import pytest
import torch

from ..thinning import thin

if os.environ.get("TESTS_ON_DEVICE"):
    import fused_eager.tpu  # noqa: F401 - registers the device
    from fused_eager.policy import hotness

    hotness.HOLDS = False  # tests run an op on one shape after the other, and mean XLA's results

    torch.backends.cudnn.allow_tf32 = False  # what is compared with the CPU is computed as exactly, on a GPU too
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of what is `thinned` to the full run; elsewhere `tests/conftest.py` has done so."""
    if os.environ.get("TESTS_ON_DEVICE"):
        thin(items)
