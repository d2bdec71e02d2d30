"""Flex attention on tensors of the device, called as it is and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Tensor = torch.Tensor
HEADS, SHARED, LENGTH, WIDTH, WINDOW = 4, 2, 32, 8, 9


def operands() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, LENGTH, WIDTH), *[(2, SHARED, LENGTH, WIDTH)] * 2, (HEADS,)]
    return [torch.randn(shape, generator=g) for shape in shapes]


def formula(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """What is attended to, in float64."""
    k, v = (x.repeat_interleave(HEADS // SHARED, 1) for x in (k, v))
    at = torch.arange(LENGTH)
    apart = at[:, None] - at[None, :]
    scores = q @ k.mT / WIDTH**0.5 - slopes[:, None, None] * apart
    seen = (apart >= 0) & (apart < WINDOW)
    return scores.where(seen, -torch.inf).softmax(-1) @ v


def outcome(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    out = function(*[x.requires_grad_() for x in given])
    out.sin().sum().backward()
    return [x.detach().cpu().double() for x in (out, *[x.grad for x in given])]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("how", ["called", "compiled"])
def test_values_and_gradients_are_those_of_the_formula(how: str) -> None:
    torch._dynamo.reset()
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < WINDOW), None, None, LENGTH, LENGTH, device="tpu",
                             BLOCK_SIZE=16)  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + slopes[h] * (j - i)

        return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)  # type: ignore[return-value]

    function = torch.compile(attend, backend="tpu", fullgraph=True) if how == "compiled" else attend
    found = outcome(function, [x.to("tpu") for x in operands()])
    expected = outcome(formula, [x.double() for x in operands()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
