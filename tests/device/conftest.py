"""Tests on tensors of the device: they need a process that has it, which `tests/test_device.py` starts."""

from __future__ import annotations

import os

if os.environ.get("TESTS_ON_DEVICE"):
    import fused_eager.tpu  # noqa: F401 - registers the device
else:
    collect_ignore_glob = ["test_*.py"]
