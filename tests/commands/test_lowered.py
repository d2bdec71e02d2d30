"""Regions that are lowered only: nothing is compiled, values are ATen's, and nothing of it is left."""

from __future__ import annotations

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.commands.lowered import lowered_only
from fused_eager.compiling import compile
from fused_eager.log.events import LOG


def test_aten_computes_what_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise AssertionError("compiled")

    def program(number: float) -> torch.Tensor:
        with fused_eager(mode="strict", native="never", cache="off"):
            return torch.index_select((x * number).relu(), 0, torch.tensor([2, 0])) + 1

    def expected(number: float) -> torch.Tensor:
        return torch.index_select((x * number).relu(), 0, torch.tensor([2, 0])) + 1

    x = torch.randn(5, 3)
    with monkeypatch.context() as patch, lowered_only():
        patch.setattr(compile, "build", build)
        for number in (2.0, -3.0):  # one region: the number is an input
            torch.testing.assert_close(program(number), expected(number))
        with pytest.raises(IndexError, match="out of range"), fused_eager(mode="strict", native="never", cache="off"):
            torch.index_select(x, 0, torch.tensor([7])).tolist()
    before = LOG.counts["compile"]
    torch.testing.assert_close(program(2.0), expected(2.0))
    assert LOG.counts["compile"] > before
