"""The inference fast paths of attention layers against ATen."""

from __future__ import annotations

import pytest
import torch

from .harness import LoweringCheck


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(norm_first: bool, activation: str) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first, activation=activation)
    with torch.no_grad(), LoweringCheck() as mode:
        layer.double().eval()(torch.randn(2, 7, 16, dtype=torch.float64))
    assert mode.checked["aten._transformer_encoder_layer_fwd.default"] == 1 and not mode.problems


@pytest.mark.parametrize("how", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_attention_layer(how: dict[str, bool]) -> None:
    layer, x = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 7, 16)
    with torch.no_grad(), LoweringCheck() as mode:
        layer(x, x, x, **how)
    assert mode.checked["aten._native_multi_head_attention.default"] == 1 and not mode.problems


def test_masks_stay_with_aten() -> None:
    layer, x = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 7, 16)
    with torch.no_grad(), LoweringCheck() as mode:
        layer(x, x, x, key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))
    assert not mode.checked["aten._native_multi_head_attention.default"] and not mode.problems
