"""What `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call whole when nothing needs a gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .lower_attention import attend
from .lower_matmul import product
from .lowering import Context, NoLowering
from .precision import accumulator, matmul_precision
from .rule import OpClass, rule


def _decline(x: jax.Array, mask: Any) -> None:
    if mask is not None:
        raise NoLowering("masks of three meanings")
    if accumulator(x.dtype) != x.dtype:
        raise NoLowering("the roundings of a whole layer of a half type add up differently")


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    acc = accumulator(x.dtype)
    y = product(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return (y + bias.astype(acc)).astype(x.dtype)


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    acc = accumulator(x.dtype)
    v = x.astype(acc)
    mean = v.mean(-1, keepdims=True)
    v = v - mean
    scale = lax.rsqrt((v * v).mean(-1, keepdims=True) + jnp.asarray(eps, acc))
    return (v * scale * weight.astype(acc) + bias.astype(acc)).astype(x.dtype)


def _heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _project(inputs: tuple[jax.Array, ...], weight: jax.Array, bias: jax.Array, heads: int) -> tuple[jax.Array, ...]:
    """q, k and v as `[B, H, T, E]`; the weight holds the three projections one below the other."""
    parts = zip(inputs, jnp.split(weight, 3), jnp.split(bias, 3), strict=True)
    return tuple(_heads(_linear(x, w, b), heads) for x, w, b in parts)


def _merge(x: jax.Array, dtype: Any) -> jax.Array:
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1).astype(dtype)


@rule("_native_multi_head_attention.default", OpClass.CONTRACTION)
def native_multi_head_attention(
    cx: Context, query: Any, key: Any, value: Any, embed_dim: int, num_head: int, qkv_weight: Any, qkv_bias: Any,
    proj_weight: Any, proj_bias: Any, mask: Any = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:  # fmt: skip
    _decline(query, mask)
    q, k, v = _project((query, key, value), qkv_weight, qkv_bias, num_head)
    out = _linear(_merge(attend(q, k, v, None, False, None)[0], query.dtype), proj_weight, proj_bias)
    if not need_weights:
        return out
    scores = jnp.einsum("bhqe,bhke->bhqk", q, k, precision=matmul_precision(), preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores / jnp.sqrt(jnp.asarray(q.shape[-1], scores.dtype)), axis=-1)
    return out, weights.mean(1) if average_attn_weights else weights


@rule("_transformer_encoder_layer_fwd.default", OpClass.CONTRACTION)
def transformer_encoder_layer(
    cx: Context, src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any,
    norm_weight_2: Any, norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any, ffn_bias_2: Any,
    mask: Any = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    _decline(src, mask)

    def attention(x: jax.Array) -> jax.Array:
        q, k, v = _project((x, x, x), qkv_weight, qkv_bias, num_heads)
        return _linear(_merge(attend(q, k, v, None, False, None)[0], x.dtype), proj_weight, proj_bias)

    def feed_forward(x: jax.Array) -> jax.Array:
        h = _linear(x, ffn_weight_1, ffn_bias_1).astype(accumulator(x.dtype))
        h = jax.nn.gelu(h, approximate=False) if use_gelu else jnp.maximum(h, 0)
        return _linear(h.astype(x.dtype), ffn_weight_2, ffn_bias_2)

    def norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return _layer_norm(x, weight, bias, eps)

    if norm_first:
        x = src + attention(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attention(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)
