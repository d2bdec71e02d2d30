"""A pytest plugin: each test's body runs inside a context of the mode that UPSTREAM_MODE names.

Collection, fixtures and what a test class sets up stay outside, as they would in a program that opens a context.
With UPSTREAM_DEVICE the process has that device instead, in that mode, and the tests are those generated for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# As in PyTorch's own runs on the CPU: no test is generated for devices that are not there. Before torch is imported.
os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", "privateuse1" if os.environ.get("UPSTREAM_DEVICE") else "cpu")

import pytest
import torch

from .compat import add_missing

PLAIN = "plain"
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "wait": {"compile": "wait"},
    "xla": {"compile": "wait", "native": "never"},
    "blocking": {"compile": "blocking"},
    "strict": {"mode": "strict"},
    "debug": {"mode": "debug"},
}
DEVICE = "UPSTREAM_DEVICE"
_device = os.environ.get(DEVICE, "")
DEVICE_MODES = ("strict", "fused", "debug")
VARIABLE = "UPSTREAM_MODE"
_mode = os.environ.get(VARIABLE, PLAIN)

torch.set_num_threads(1)
if _device:  # before anything asks torch which devices tests are generated for
    os.environ["FUSED_EAGER_MODE"] = _mode
    from fused_eager import register

    register(_device)
add_missing()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if _device:
        result = yield
        torch.accelerator.synchronize()  # what has failed late is this test's, not the next one's
        return result
    if _mode == PLAIN:
        return (yield)
    from fused_eager import fused_eager

    with fused_eager(**MODES[_mode]):
        return (yield)
