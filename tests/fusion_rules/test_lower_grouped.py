"""Products of groups of rows, and of scaled eight-bit matrices, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_eager import fused_eager

from .errors import assert_same

A = torch.ops.aten
DTYPE = torch.bfloat16


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


GROUPED: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor | None]] = {
    "rows": ((300, 64), (4, 64, 32), offsets(10, 10, 171, 300)),
    "rows, one of them twice": ((300, 64), (4, 64, 32), offsets(10, 5, 171, 300)),
    "columns": ((3, 16, 64), (64, 160), offsets(16, 144, 160)),
    "sums": ((64, 320), (320, 32), offsets(16, 16, 160, 320)),
    "batches": ((3, 16, 64), (3, 64, 32), None),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups(name: str) -> None:
    first, second, ends = GROUPED[name]
    assert_same(A._grouped_mm.default, torch.randn(first).to(DTYPE), torch.randn(second).to(DTYPE), ends)


def test_rows_of_no_group_are_zeros() -> None:
    x, w = torch.randn(32, 16).to(DTYPE), torch.randn(2, 16, 8).to(DTYPE)
    with fused_eager(islands="refuse"):
        out = F.grouped_mm(x, w, offs=offsets(3, 9))
    assert torch.equal(out[:9], F.grouped_mm(x, w, offs=offsets(3, 9))[:9]) and not out[9:].any()


@pytest.mark.parametrize("mode", ["fused", "strict"])
def test_a_mixture_of_experts_trains_without_an_island(mode: str) -> None:
    def gradients(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        F.grouped_mm(x * 2, w, offs=offsets(7, 40, 64)).float().square().mean().backward()
        return [x.grad, w.grad]  # type: ignore[list-item]

    x, w = torch.randn(64, 16).to(DTYPE), torch.randn(3, 16, 8).to(DTYPE)
    expected = gradients(x, w)
    with fused_eager(mode=mode, islands="refuse"):
        found = gradients(x, w)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("rows", "columns", "out"),
    [((), (), torch.bfloat16), ((), (), torch.float32), ((16, 1), (1, 48), torch.bfloat16)],
    ids=["whole", "whole, in float32", "by row and column"],
)
def test_scaled_floats(rows: Any, columns: Any, out: torch.dtype) -> None:
    has_recipes = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
    if rows and not has_recipes:
        pytest.skip("torch 2.11 takes no scales of rows on the CPU")
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    scales, recipe = (torch.rand(rows), torch.rand(columns)), [1 if rows else 0]
    assert_same(A._scaled_mm.default, a, b, *scales, out_dtype=out)
    if has_recipes:  # torch.nn.functional.scaled_mm
        given = ([scales[0]], recipe, [], [scales[1]], recipe, [])
        assert_same(A._scaled_mm_v2.default, a, b, *given, torch.rand(48), out)


def test_weights_of_eight_bits() -> None:
    weights = torch.randint(-127, 127, (48, 32), dtype=torch.int8)
    assert_same(A._weight_int8pack_mm.default, torch.randn(16, 32).to(DTYPE), weights, torch.rand(48).to(DTYPE))
