"""Every test of this folder runs once per mode, and leaves nothing behind for the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_eager import current_mode
from fused_eager.devices.buffer import sweep
from fused_eager.devices.host.buffers import TABLE

from .programs import MODES


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """One of the three modes."""
    return str(request.param)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """After each test: no open context, no buffer of a tensor that still lives, default settings."""
    yield
    assert current_mode() == "off"
    # A trace that raised inside a context leaves torch's tracing mode set: every op of ours would then run natively.
    while torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        pass
    assert torch.get_default_dtype() is torch.float32
    sweep(TABLE)
    pending = [b for b in TABLE.values() if b.stream is not None]
    for b in pending:
        del TABLE[b.cdata]
    whose = {(b.stream.thread, b.stream.config.mode, str([n.place for n in b.stream.nodes][-2:])) for b in pending}
    assert not pending, f"{len(pending)} tensors are still pending after the context, of (thread, mode, ops): {whose}"
