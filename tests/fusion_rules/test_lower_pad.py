"""Padding and its gradients, against eager."""

from __future__ import annotations

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering

from .errors import assert_same, lowered
from .harness import sweep

A = torch.ops.aten


@pytest.mark.parametrize("name", ["constant_pad_nd", "nn.functional.pad"])
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float32], limit=2)
    found = [p for p in mode.problems if "empty" not in p[0]]  # what new_empty holds is nobody's promise
    assert mode.checked and not found


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("pad", [(2, 1), (0, 3), (-1, 2), (2, -3), (-1, -1), (0, 0)])
def test_one_dimension(kind: str, pad: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 6)
    forward, backward = (getattr(A, f"{kind}_pad1d{end}").default for end in ("", "_backward"))
    assert_same(forward, x, pad)
    assert_same(backward, torch.randn_like(forward(x, pad)), x, pad)


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_several_dimensions(kind: str, dtype: torch.dtype) -> None:
    for rank, pad in ((2, [1, 2, 3, 0]), (3, [1, 0, 2, 1, 1, 1])):
        x = torch.randn(2, *(4,) * rank).to(dtype)
        forward, backward = (getattr(A, f"{kind}_pad{rank}d{end}").default for end in ("", "_backward"))
        assert_same(forward, x, pad)
        # Positive, so that eager's own rounding of bfloat16 sums is not magnified by cancellation.
        assert_same(backward, torch.rand_like(forward(x, pad)), x, pad)


def test_a_constant_is_cut_where_padding_is_negative() -> None:
    x = torch.randn(3, 4)
    assert_same(A.constant_pad_nd.default, x, [-1, 2, 1, -2], float("-inf"))
    assert_same(A.constant_pad_nd.default, x.long(), [1, 1], 7)
    assert_same(A.constant_pad_nd.default, x > 0, [1, 1], 1)


def test_a_constant_that_does_not_fit_is_left_to_eager() -> None:
    with pytest.raises(NoLowering, match="does not fit"):
        lowered(A.constant_pad_nd.default, torch.empty(4), torch.ones(2), [1, 1], 1e39)
