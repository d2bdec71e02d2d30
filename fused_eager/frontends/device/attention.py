"""Attention: `scaled_dot_product_attention` as one op, whose derivative is another, as CPU tensors have it.

torch asks backends in C++ whether they have that, and takes attention of the others apart, into products whose scores
are kept for the way back. So it is met where it is still whole; with dropout, too, for which there is an op of our own.
What these have not is left to torch's own form: gradients of a mask, derivatives of derivatives, tangents, and what
`torch.nn.attention.sdpa_kernel` forbids.

Tensors that wrap others (DTensor) are shown the op that CUDA has for it, as torch knows how to shard that one, for
tensor parallel and for context parallel. On what they wrap it is the former op once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .doors import is_on_device
from .random import draws_as_cpu

Tensor = torch.Tensor
aten = torch.ops.aten
_OPS = torch.ops.fused_eager
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _by_torch(*args: Any, **kwargs: Any) -> Tensor:
    op = aten.scaled_dot_product_attention.default
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """The op and its derivative."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: Any) -> Tensor:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.how = causal, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, mask = ctx.saved_tensors
        (grad,), (causal, scale) = grads, ctx.how
        if torch.is_grad_enabled():

            def made() -> Tensor:
                return _by_torch(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

            found = _with_derivative(made, (q, k, v), ctx.needs_input_grad, grad)
        else:
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
        return (*found, None, None, None)


class _Dropped(torch.autograd.Function):
    """The same with dropout: `kept` says which of the probabilities stay."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, mask: Tensor | None, p: float, causal: bool, scale: Any
    ) -> Tensor:
        out, probabilities = _OPS._scaled_dot_product_attention_dropped(q, k, v, kept, mask, p, causal, scale)
        ctx.save_for_backward(q, k, v, kept, mask, out, probabilities)
        ctx.how = p, causal, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, kept, mask, out, probabilities = ctx.saved_tensors
        (grad,), (p, causal, scale) = grads, ctx.how
        if torch.is_grad_enabled():
            from fused_eager.fusion_rules.lower_dropped_attention import in_torch

            def made() -> Tensor:
                return in_torch(q, k, v, kept, mask, p, causal, scale)[0]

            found = _with_derivative(made, (q, k, v), ctx.needs_input_grad, grad)
        else:
            found = _OPS._scaled_dot_product_attention_dropped_backward(
                grad, q, k, v, kept, out, probabilities, p, scale
            )
        return (*found, None, None, None, None, None)


def _with_derivative(
    made: Callable[[], Tensor], inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of some inputs, of which another derivative may be asked."""
    wanted = [t for t, needs in zip(inputs, needed, strict=False) if needs]
    of = iter(torch.autograd.grad(made(), wanted, grad, create_graph=True))
    return tuple(next(of) if needs else None for _, needs in zip(inputs, needed, strict=False))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What stands for `scaled_dot_product_attention` on the device."""
    given = (query, key, value)
    is_wrapped = any(is_traceable_wrapper_subclass(t) for t in given)
    drops = 0 < dropout_p < 1 and not is_wrapped and not draws_as_cpu()
    if (dropout_p and not drops) or not _fits(*given, attn_mask, is_causal, enable_gqa):
        return _by_torch(*given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_wrapped:
        if attn_mask is not None or key.shape[1] != query.shape[1]:
            return _by_torch(*given, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        return aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if drops:
        kept = query.new_empty((*query.shape[:3], key.shape[2]), dtype=torch.bool).bernoulli_(1 - dropout_p)
        return _Dropped.apply(*given, kept, attn_mask, dropout_p, is_causal, scale)  # type: ignore[no-any-return]
    return _Attention.apply(*given, attn_mask, is_causal, scale)  # type: ignore[no-any-return]


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grouped: bool) -> bool:
    """Whether the op takes such a call, as far as it is none that torch refuses."""
    if not all(t.ndim == 4 and t.numel() and is_on_device(t) for t in (q, k, v)):
        return False
    batch, heads, _, width = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, width) or {k.dtype, v.dtype} != {q.dtype}:
        return False
    if q.dtype not in _FLOATS or not (k.shape[1] == heads or (grouped and heads % k.shape[1] == 0)):
        return False
    if mask is not None:
        if causal or mask.ndim not in (2, 4) or not is_on_device(mask) or mask.requires_grad:
            return False
        whole = (batch, heads, q.shape[2], k.shape[2])[4 - mask.ndim :]
        alike = all(n in (1, m) for n, m in zip(mask.shape, whole, strict=True))
        if not alike or mask.dtype not in (torch.bool, q.dtype):
            return False
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # a tangent, or a transform of `torch.func`
    return bool(torch.backends.cuda.flash_sdp_enabled())


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """What stands for `_scaled_dot_product_flash_attention`: the result, the log-sum-exp [batch, heads, queries], and
    what the derivative is given of dropout, which is nothing.

    Raises:
        NotImplementedError: dropout is asked for.
    """
    if dropout_p or return_debug_mask:
        raise NotImplementedError(f"_scaled_dot_product_flash_attention has no dropout on {query.device}")
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    nothing = [torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2)]
    return out, lse, None, None, query.shape[2], key.shape[2], *nothing, query.new_empty(0)


def flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """The same for its derivative. `rest`: four lengths, how much dropout, whether it is causal, and two seeds."""
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, rest[5], scale=scale
    )


def ragged_attention_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What stands for `_flash_attention_forward_no_dropout_inplace` (`varlen_attn_out`). Returns the log-sum-exp."""
    made, sums, *_ = aten._flash_attention_forward(*args, **kwargs)
    out.copy_(made)
    return sums  # type: ignore[no-any-return]


KERNELS = {"scaled_dot_product_attention": attention}
