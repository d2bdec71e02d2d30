"""Batch norm over several ranks: what `SyncBatchNorm` asks every accelerator for, and no other device of torch's has.

Each rank's mean and deviation, those of all ranks together, the normalising itself and both halves of the derivative,
in ops that are recorded. Statistics of half types are in float32. What belongs to a channel, the second dimension, has
one number for each.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _along(of_channel: Tensor, x: Tensor) -> Tensor:
    return of_channel.reshape(1, -1, *[1] * (x.dim() - 2))


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean of this rank's part, and one over its deviation."""
    variance, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


def gather_stats(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of all ranks together, of what each has found for so many numbers; the running averages move there."""
    n = counts.to(means.dtype).unsqueeze(-1)
    total = n.sum()
    mean = (n * means).sum(0) / total
    squares = (n * (invstds.square().reciprocal() - eps + (means - mean).square())).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = squares / (total - 1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return mean, torch.rsqrt(squares / total + eps)


def normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """The batch with this mean and deviation taken out, scaled and moved."""
    out = (_wide(x) - _along(mean, x)) * _along(invstd, x)
    if weight is not None:
        out = out * _along(weight, x)
    if bias is not None:
        out = out + _along(bias, x)
    return out.to(x.dtype)


def backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, of_x: bool, of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """This rank's part of the sums that the derivative takes, and the gradients of weight and bias."""
    grad = _wide(grad)
    sums = grad.sum(_others(x))
    products = (grad * (_wide(x) - _along(mean, x))).sum(_others(x))
    dtype = sums.dtype if weight is None else weight.dtype
    return (
        sums if of_x else None,
        products if of_x else None,
        (products * invstd).to(dtype) if of_weight else None,
        sums.to(dtype) if of_bias else None,
    )


def backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    """The gradient of the batch, from the sums of all ranks."""
    total = counts.sum().to(sums.dtype)
    scale = invstd if weight is None else invstd * weight
    slope = invstd.square() * products / total
    out = _wide(grad) - _along(sums / total, x) - (_wide(x) - _along(mean, x)) * _along(slope, x)
    return (out * _along(scale, x)).to(x.dtype)


KERNELS = {
    "aten.batch_norm_stats.default": stats,
    "aten.batch_norm_gather_stats_with_counts.default": gather_stats,
    "aten.batch_norm_elemt.default": normalised,
    "aten.batch_norm_backward_reduce.default": backward_reduce,
    "aten.batch_norm_backward_elemt.default": backward,
}
