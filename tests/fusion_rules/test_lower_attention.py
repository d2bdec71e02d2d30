"""Scaled dot-product attention, whole and tiled, against ATen's flash kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_eager.fusion_rules import lower_attention
from fused_eager.fusion_rules.lowering import NoLowering

from .errors import assert_same, lowered
from .harness import sweep

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SDPA = torch.ops.aten.scaled_dot_product_attention.default


@pytest.fixture(params=["whole", "tiled"])
def form(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tiled":
        monkeypatch.setitem(lower_attention.SCORES_BYTES.own, "cpu", 0)
        monkeypatch.setattr(lower_attention, "BLOCK", 4)
    return str(request.param)


def qkv(queries: int = 9, keys: int = 11, heads: int = 2) -> list[torch.Tensor]:
    shapes = [(2, 4, queries, 8), (2, heads, keys, 8), (2, heads, keys, 8)]
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def masks() -> list[torch.Tensor | None]:
    hidden = torch.zeros(9, 11, dtype=torch.float64)
    hidden[3] = -torch.inf
    hidden[:, 7:] = -torch.inf
    return [None, hidden, torch.randn(2, 1, 9, 11, dtype=torch.float64), torch.randn(2, 4, 9, 11, dtype=torch.float64)]


# eager takes a causal flag or a mask, not both
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("mask", "causal"), [(0, False), (0, True), (1, False), (2, False), (3, False)])
@pytest.mark.parametrize("heads", [2, 4])
def test_forward_and_backward(form: str, mask: int, causal: bool, heads: int) -> None:
    q, k, v = qkv(heads=heads)
    attn_mask = masks()[mask]
    assert_same(FLASH, q, k, v, 0.0, causal, attn_mask=attn_mask, scale=0.3)
    out, lse = FLASH(q, k, v, 0.0, causal, attn_mask=attn_mask, scale=0.3)
    if heads == 4:
        grad = torch.randn_like(out)
        assert_same(BACKWARD, grad, q, k, v, out, lse, 0.0, causal, attn_mask=attn_mask, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(13, 5), (5, 13), (1, 1)])
def test_lengths(form: str, sizes: tuple[int, int], causal: bool) -> None:
    q, k, v = qkv(*sizes, heads=4)
    out, lse = FLASH(q, k, v, 0.0, causal)
    assert_same(FLASH, q, k, v, 0.0, causal)
    assert_same(BACKWARD, torch.randn_like(out), q, k, v, out, lse, 0.0, causal)


def test_bfloat16(form: str) -> None:
    q, k, v = (x.bfloat16() for x in qkv(heads=4))
    want = FLASH(q, k, v)
    out, lse = lowered(FLASH, list(want), q, k, v)
    # Eager's own exponential of half types is off by 5e-5 on processors with AVX2.
    exact = FLASH(q.double(), k.double(), v.double())
    torch.testing.assert_close(lse, exact[1].float())
    torch.testing.assert_close(lse, want[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, want[0], rtol=2e-2, atol=5e-3)


def test_inference_mode_composite() -> None:
    q, k, v = qkv(heads=4)
    assert_same(SDPA, q, k, v)
    assert_same(SDPA, q[0], k[0], v[0])
    assert_same(SDPA, q[0, 0], k[0, 0], v[0, 0], scale=2.0)
    assert_same(SDPA, q, k, v, torch.rand(9, 11) > 0.3)
    assert_same(SDPA, q[None], k[None], v[None], torch.randn(2, 1, 9, 11, dtype=torch.float64))
    assert_same(SDPA, q, k[:, :2], v[:, :2], enable_gqa=True)
    with pytest.raises(NoLowering):
        lowered(SDPA, q, q, k, v, None, 0.5)


def test_sweep() -> None:
    mode = sweep(["nn.functional.scaled_dot_product_attention"], [torch.float64], limit=3)
    assert mode.checked and not mode.problems
