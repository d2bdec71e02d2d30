"""Softmax and its relatives against eager."""

from __future__ import annotations

import pytest
import torch

from .errors import assert_same
from .harness import sweep

INF = float("inf")
A = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def test_corpus() -> None:
    mode = sweep(["softmax", "log_softmax"], [torch.float32, torch.bfloat16], limit=4)
    assert not mode.problems
    assert mode.checked


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward(dtype: torch.dtype, dim: int) -> None:
    x, dy = ((torch.randn(5, 6, 7) * 5).to(dtype) for _ in range(2))
    for forward, backward in (
        (A._softmax.default, A._softmax_backward_data.default),
        (A._log_softmax.default, A._log_softmax_backward_data.default),
    ):
        assert_same(forward, x, dim, False)
        assert_same(backward, dy, forward(x, dim, False), dim, dtype)


def test_rows_that_are_masked_or_huge() -> None:
    x = torch.tensor([[-INF, -INF], [-INF, 0.0], [1e30, 1e30], [INF, 0.0], [float("nan"), 0.0]])
    for op in (A._softmax.default, A._log_softmax.default):
        assert_same(op, x, 1, False)
    assert_same(A._safe_softmax.default, x, 1)
    assert_same(A._safe_softmax.default, x.bfloat16(), 0, torch.float32)


def test_nothing_and_single_numbers() -> None:
    for x in (torch.tensor(2.0), torch.empty(0, 3), torch.empty(3, 0)):
        assert_same(A._softmax.default, x, 0, False)
        assert_same(A._log_softmax_backward_data.default, x, x, 0, torch.float32)


@pytest.mark.parametrize("mask_type", [0, 1, 2])
def test_masked(mask_type: int) -> None:
    x = torch.randn(2, 3, 4, 4)
    mask = torch.rand([(4, 4), (2, 4), (2, 3, 4, 4)][mask_type]) > 0.5
    assert_same(A._masked_softmax.default, x, mask, 3, mask_type)


def test_masked_backward() -> None:
    x, mask = torch.randn(2, 3, 4), torch.rand(2, 3, 4) > 0.7
    out = A._masked_softmax(x, mask, 2)
    assert_same(A._masked_softmax_backward.default, torch.randn_like(x), out, mask, 2)
    assert_same(A._masked_softmax_backward.default, torch.randn_like(x), out, mask)
