"""Backward passes on the device: what a hook of the program's raises in one, and batch norm of a batch in parts."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .compare import TPU


def _fails(*args: Any) -> Any:
    raise ValueError("of a hook of mine")


def _accumulates(p: torch.Tensor) -> Any:
    p.node = p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[attr-defined,union-attr]  # which nobody else keeps
    return p.node  # type: ignore[attr-defined]


HOOKS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "a gradient's": lambda m, p: p.register_hook(_fails),
    "an accumulated gradient's": lambda m, p: p.register_post_accumulate_grad_hook(_fails),
    "a module's": lambda m, p: m.register_full_backward_hook(_fails),
    "a node's": lambda m, p: _accumulates(p).register_hook(_fails),
    "before a node": lambda m, p: _accumulates(p).register_prehook(_fails),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
def test_what_a_hook_raises_is_raised(hook: str, again: bool) -> None:
    """torch's guard in C++ ends the process where it finds the exception on its way."""
    layer = nn.Linear(4, 4).to(TPU)
    x = torch.ones(2, 4, device=TPU, requires_grad=True)
    kept = HOOKS[hook](layer, layer.weight)
    for _ in range(2):
        out = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
        with pytest.raises(ValueError, match="of a hook of mine") as raised:
            out.sum().backward()
        assert "_fails" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert raised.value.__suppress_context__ or raised.value.__context__ is None
    kept.remove()
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_weight", [True, False], ids=["scaled", "not scaled"])
def test_batch_norm_of_a_batch_in_parts(has_weight: bool, dtype: torch.dtype) -> None:
    """As `SyncBatchNorm` does it, each part on a rank of its own: what batch norm makes of the whole batch."""
    torch.manual_seed(0)
    whole = nn.BatchNorm2d(3, affine=has_weight).double()
    x = torch.randn(5, 3, 2, 4, dtype=torch.float64).to(dtype).double().requires_grad_()
    grad = torch.randn_like(x).to(dtype).double()
    out = whole(x)
    out.backward(grad)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    parts = [x.detach()[:2].to(TPU, dtype), x.detach()[2:].to(TPU, dtype)]
    grads = [grad[:2].to(TPU, dtype), grad[2:].to(TPU, dtype)]
    weight, bias = (torch.full((3,), v, dtype=dtype, device=TPU) if has_weight else None for v in (1.0, 0.0))
    found = [torch.batch_norm_stats(part, whole.eps) for part in parts]
    average, variance = torch.zeros(3, device=TPU, dtype=wide), torch.ones(3, device=TPU, dtype=wide)
    counts = torch.tensor([16.0, 24.0], device=TPU, dtype=wide)
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0], torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found]), average, variance,
        whole.momentum, whole.eps, counts,
    )  # fmt: skip
    sums = [
        torch.batch_norm_backward_reduce(g, part, mean, invstd, weight, True, has_weight, has_weight)
        for g, part in zip(grads, parts, strict=True)
    ]
    dy, dy_xmu = sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]
    ways = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}

    def same(a: torch.Tensor, b: Any) -> None:
        torch.testing.assert_close(a.cpu().double(), b.detach(), **ways)

    normed = [torch.batch_norm_elemt(part, weight, bias, mean, invstd, whole.eps) for part in parts]
    assert all(t.dtype is dtype for t in normed)
    same(torch.cat(normed), out)
    same(average, whole.running_mean)
    same(variance, whole.running_var)
    back = [
        torch.batch_norm_backward_elemt(g, part, mean, invstd, weight, dy, dy_xmu, counts.int())
        for g, part in zip(grads, parts, strict=True)
    ]
    same(torch.cat(back), x.grad)
    if has_weight:
        same(sums[0][2] + sums[1][2], whole.weight.grad)
        same(sums[0][3] + sums[1][3], whole.bias.grad)
    else:
        assert sums[0][2] is None and sums[0][3] is None
