"""Which buffers are looked at, to forget the dead: few in each run, and soon enough for the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.devices import buffer
from fused_eager.devices.host.buffers import TABLE


def test_a_run_looks_at_few_of_many_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    dead = buffer.dead

    def counted(buffers: list[Any]) -> list[Any]:
        looked.append(len(buffers))
        return dead(buffers)

    monkeypatch.setattr(buffer, "dead", counted)
    with fused_eager(mode="strict"):
        kept = [torch.ones(2) + number for number in range(500)]
        y = kept[0] * 2
        looked.clear()
        for _ in range(100):
            y = y * 1.01
        assert len(TABLE) >= 500
        assert len(looked) >= 100 and sum(looked) <= 100 * 2 * buffer.LOOKED_AT


def test_large_results_that_nobody_has_any_more_are_let_go_at_once() -> None:
    with fused_eager(mode="strict"):
        kept = [torch.ones(2) + number for number in range(500)]
        for _ in range(40):
            large = torch.ones(1 << 18) + len(kept)
            del large
            held = sum(b.array.nbytes for b in TABLE.values() if b.array is not None)
            assert held <= 4 << 20


def test_small_results_that_live_for_a_while_are_let_go_in_the_end() -> None:
    with fused_eager(mode="strict"):
        kept = [torch.ones(2) + number for number in range(200)]
        passing = [torch.ones(2) + number for number in range(200)]
        before = len(TABLE)
        y = kept[0] * 2
        del passing
        for _ in range(before // buffer.LOOKED_AT + 1):
            y = y * 1.01
        assert len(TABLE) <= before - 190
