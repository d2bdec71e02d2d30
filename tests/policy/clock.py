"""Time that passes when it is told to, for what chooses by the clock, and for nothing else in the process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fused_eager.policy import allowance, alone, autotuner, hotness, policy, segment


class Clock:
    """The clock of the policy's modules; `now` in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now)
        for module in (allowance, alone, autotuner, hotness, policy, segment):
            monkeypatch.setattr(module, "time", clock)
