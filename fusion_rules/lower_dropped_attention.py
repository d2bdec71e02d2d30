"""Scaled dot-product attention with dropout, and its derivative, as one op each. ATen has none for all devices.

Which probabilities are kept is an argument, so that a draw is made once and is the same for both. The probabilities are
a result: what they take is what attention takes in separate ops, too, and nothing is computed twice.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import torch

from .axes import total
from .lower_attention import Heads, contracted
from .lower_softmax import safe_softmax_along
from .lowering import Context
from .rule import OpClass, rule

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("fused_eager", "FRAGMENT")
_FORWARD = _LIBRARY.define(
    "_scaled_dot_product_attention_dropped(Tensor query, Tensor key, Tensor value, Tensor kept, Tensor? attn_mask, "
    "float dropout_p, bool is_causal, float? scale) -> (Tensor out, Tensor probabilities)"
)
_BACKWARD = _LIBRARY.define(
    "_scaled_dot_product_attention_dropped_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor kept, "
    "Tensor out, Tensor probabilities, float dropout_p, float? scale) -> (Tensor, Tensor, Tensor)"
)


def in_torch(
    query: Tensor, key: Tensor, value: Tensor, kept: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in ops of ATen's, each with a derivative: the output and the probabilities before dropout.

    Shapes: query `[B, H, L, E]`, key and value `[B, H or a part of it, S, E]`, kept `[B, H, L, S]` of booleans.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = _shared(key, groups), _shared(value, groups)
    scores = query @ key.mT * _scale(scale, query)
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    probabilities = torch.ops.aten._safe_softmax(scores, -1)
    return torch.where(kept, probabilities / (1 - dropout_p), 0.0) @ value, probabilities


def _backward_in_torch(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, out: Tensor, probabilities: Tensor,
    dropout_p: float, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    keys, values = _shared(key, groups), _shared(value, groups)
    part = 1 / (1 - dropout_p)
    grads = torch.where(kept, grad @ values.mT * part, 0.0) - (grad * out).sum(-1, keepdim=True)
    grads = probabilities * grads * _scale(scale, query)
    of_value = torch.where(kept, probabilities * part, 0.0).mT @ grad

    def gathered(t: Tensor) -> Tensor:
        return t.unflatten(1, (-1, groups)).sum(2) if groups > 1 else t

    return grads @ keys, gathered(grads.mT @ query), gathered(of_value)


def _shared(t: Tensor, groups: int) -> Tensor:
    """Keys or values, repeated for the query heads that share them."""
    return t.repeat_interleave(groups, 1) if groups > 1 else t


def _scale(scale: float | None, query: Any) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


for _key in ("CPU", "Meta"):  # on a device the op is recorded
    _LIBRARY.impl(_FORWARD.removeprefix("fused_eager::"), in_torch, _key)
    _LIBRARY.impl(_BACKWARD.removeprefix("fused_eager::"), _backward_in_torch, _key)


@rule("fused_eager._scaled_dot_product_attention_dropped.default", OpClass.CONTRACTION, hoist=["dropout_p"])
def attention_dropped(
    cx: Context, query: Any, key: Any, value: Any, kept: Any, attn_mask: Any, dropout_p: Any, is_causal: bool,
    scale: float | None,
) -> Any:  # fmt: skip
    run = Heads(query, key, attn_mask, is_causal, scale)
    s = run.scores(query, run.share(key), run.mask, 0)
    p = safe_softmax_along(cx, s, 3)  # a query that sees nothing gets 0, as in ATen
    dropped = _dropped(p.astype(query.dtype), kept, dropout_p)
    return contracted(dropped.astype(query.dtype), run.share(value), 1, 2), p


@rule("fused_eager._scaled_dot_product_attention_dropped_backward.default", OpClass.CONTRACTION, hoist=["dropout_p"])
def attention_dropped_backward(
    cx: Context, grad: Any, query: Any, key: Any, value: Any, kept: Any, out: Any, probabilities: Any, dropout_p: Any,
    scale: float | None,
) -> Any:  # fmt: skip
    run = Heads(query, key, None, False, scale)
    dropped = _dropped(probabilities, kept, dropout_p).astype(query.dtype)
    of_dropped = _dropped(contracted(grad, run.share(value), 1, 1), kept, dropout_p)
    acc = of_dropped.dtype
    along = total(grad.astype(acc) * out.astype(acc), (3,))
    of_scores = probabilities.astype(acc) * (of_dropped - along) * jnp.asarray(run.scale, acc)
    of_scores = of_scores.astype(query.dtype)
    of_key, of_value = contracted(of_scores, query, 2, 2), contracted(dropped, grad, 2, 2)
    return contracted(of_scores, run.share(key), 1, 2), run.gather(of_key), run.gather(of_value)


def _dropped(x: Any, kept: Any, dropout_p: Any) -> Any:
    """`x` after dropout; in the derivative, the gradient of `x`."""
    return jnp.where(kept, x / (1 - jnp.asarray(dropout_p)).astype(x.dtype), 0)
