"""Ops that torch has for accelerators alone: products with another dtype, of groups of scaled eight-bit matrices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

PRODUCTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mm": lambda x, how: torch.mm(x, x.T, **how),
    "bmm": lambda x, how: torch.bmm(x[None], x.T[None], **how),
    "addmm": lambda x, how: torch.addmm(x[:, :3], x, x.T, beta=0.5, alpha=2, **how),
    "baddbmm": lambda x, how: torch.baddbmm(x[:, :3], x[None], x.T[None], beta=0.5, alpha=2, **how),
    "baddbmm of nothing": lambda x, how: torch.baddbmm(x[:, :3] / 0, x[None], x.T[None], beta=0, **how),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_are_not_rounded(name: str) -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = PRODUCTS[name](x.to("tpu"), {"out_dtype": torch.float32})
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.cpu(), PRODUCTS[name](x.float(), {}), rtol=1e-5, atol=1e-5)


def test_a_mask_of_bytes_scales() -> None:
    x, mask = torch.randn(4, 4), torch.tensor([[0, 1, 1, 0]] * 4, dtype=torch.uint8)
    out = torch.ops.aten._masked_scale(x.to("tpu"), mask.to("tpu"), 2.0)
    assert torch.equal(out.cpu(), x * mask * 2)


SCALED: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int] | None, tuple[int, ...], tuple[int, ...]]] = {
    "rows": ((96, 64), (3, 64, 32), [16, 16, 96], (96,), (3, 32)),
    "columns": ((3, 16, 64), (64, 96), [16, 48, 96], (3, 16), (96,)),
    "sums": ((48, 96), (96, 32), [16, 48, 96], (144,), (96,)),
    "batches": ((3, 16, 64), (3, 64, 32), None, (3, 16), (3, 32)),
}


def group_by_group(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: list[int] | None) -> Tensor:
    """`scaled_grouped_mm` in float32."""
    if ends is None:
        return (a @ b) * scale_a[:, :, None] * scale_b[:, None]
    groups = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
    if a.ndim == b.ndim == 2:
        scale_a, scale_b = scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1)
        return torch.stack([(a[:, s] @ b[s]) * scale_a[g] * scale_b[g] for g, s in enumerate(groups)])
    if a.ndim == 2:
        return torch.cat([(a[s] @ b[g]) * scale_a[s, None] * scale_b[g] for g, s in enumerate(groups)])
    return torch.cat([(a[g] @ b[:, s]) * scale_a[g][:, None] * scale_b[s] for g, s in enumerate(groups)], 1)


@pytest.mark.skipif(not hasattr(F, "scaled_grouped_mm"), reason="this torch has none")
@pytest.mark.parametrize("name", SCALED)
def test_scaled_products_of_groups(name: str) -> None:
    of_a, of_b, ends, *of_scales = SCALED[name]
    g = torch.Generator().manual_seed(0)
    a = torch.randn(of_a, generator=g).to(torch.float8_e4m3fn)
    b = torch.randn(*of_b[:-2], of_b[-1], of_b[-2], generator=g).to(torch.float8_e4m3fn)  # the factor is its transpose
    scales = [torch.rand(shape, generator=g) + 0.5 for shape in of_scales]
    expected = group_by_group(a.float(), b.float().mT, *scales, ends)
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32).to("tpu")
    rows = [F.ScalingType.RowWise] * 2
    first, second = (s.to("tpu") for s in scales)
    out = F.scaled_grouped_mm(a.to("tpu"), b.to("tpu").mT, first, rows[0], second, rows[1], offs=offsets)
    torch.testing.assert_close(out.cpu().float(), expected, rtol=8e-3, atol=8e-3)


@pytest.mark.skipif(not hasattr(F, "scaled_grouped_mm"), reason="this torch has none")
def test_groups_that_begin_before_the_last_one_ends_are_scaled_as_they_are_multiplied() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(96, 64, generator=g), torch.randn(3, 32, 64, generator=g)
    a, b = (t.to(torch.float8_e4m3fn).to("tpu") for t in (a, b))
    offsets = torch.tensor([40, 16, 96], dtype=torch.int32).to("tpu")  # the second is empty, the third overwrites
    scales = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 32).contiguous().to("tpu")
    rows = F.ScalingType.RowWise
    out = F.scaled_grouped_mm(a, b.mT, torch.ones(96, device="tpu"), rows, scales, rows, offs=offsets).cpu().float()
    wide, weights = a.cpu().float(), b.cpu().float().mT
    expected = torch.cat([wide[:16] @ weights[0], wide[16:] @ weights[2] * 4])
    torch.testing.assert_close(out, expected, rtol=8e-3, atol=8e-3)


@pytest.mark.skipif(not hasattr(F, "scaled_grouped_mm"), reason="this torch has none")
def test_other_recipes_of_scales_are_refused() -> None:
    a = torch.zeros(3, 16, 16, device="tpu").to(torch.float8_e4m3fn)
    whole = F.ScalingType.TensorWise
    with pytest.raises(NotImplementedError, match=r"RowWise.*not the recipes \[0\] and \[0\]"):
        F.scaled_grouped_mm(a, a.mT, torch.ones(1, device="tpu"), whole, torch.ones(1, device="tpu"), whole)
