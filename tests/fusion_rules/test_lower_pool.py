"""Pooling windows of every kind against ATen, with what maxima do about nan, ties and infinities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from fused_eager.fusion_rules import pool_windows

from .errors import assert_same, lowered
from .harness import sweep

A = torch.ops.aten
# kernel, stride, padding, dilation, ceil_mode
MAX2D: list[tuple[Any, ...]] = [
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([2, 2], [2, 2], [0, 0], [1, 1], False),
    ([2, 3], [], [0, 1], [1, 1], True),
    ([3, 2], [2, 3], [1, 1], [2, 2], True),
    ([4, 4], [1, 3], [2, 2], [1, 2], False),
    ([9, 8], [], [0, 0], [1, 1], False),
]


def image(dtype: torch.dtype = torch.float32, *lead: int) -> torch.Tensor:
    x = torch.randint(-4, 5, (*(lead or (2, 3)), 9, 8)).to(dtype)
    if dtype.is_floating_point:
        x[..., 2, 3] = torch.nan
        x[..., 2, 4] = torch.nan
        x[..., 5:, 5:] = -torch.inf
    return x


@pytest.mark.thinned(2)
@pytest.mark.parametrize("args", MAX2D, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_max_pool2d(args: Any, dtype: torch.dtype) -> None:
    x = image(dtype)
    assert_same(A.max_pool2d_with_indices.default, x, *args)
    y, index = A.max_pool2d_with_indices(x, *args)
    if dtype == torch.float32:
        g = torch.randn_like(y)
        assert_same(A.max_pool2d_with_indices_backward.default, g, x, *args, index)
        assert_same(A.max_pool2d_with_indices.default, x[0], *args)


def test_max_pool3d() -> None:
    x = torch.randint(-4, 5, (2, 2, 5, 6, 7)).double()
    args = ([3, 2, 3], [2, 2, 1], [1, 0, 1], [1, 2, 1], True)
    assert_same(A.max_pool3d_with_indices.default, x, *args)
    y, index = A.max_pool3d_with_indices(x, *args)
    assert_same(A.max_pool3d_with_indices_backward.default, torch.randn_like(y), x, *args, index)


@pytest.mark.parametrize("args", MAX2D[:4], ids=str)
def test_long_windows_agree_with_short_ones(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_windows, "MOST_TAPS", 1)
    x = image()
    assert_same(A.max_pool2d_with_indices.default, x, *args)
    kernel, stride, padding, _, ceil = args
    whole = (kernel, stride or kernel, padding, ceil, True, None)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    assert_same(A.avg_pool2d.default, x, *whole)
    assert_same(A.avg_pool2d_backward.default, torch.randn_like(A.avg_pool2d(x, *whole)), x, *whole)


@pytest.mark.parametrize("kernel", [[3, 3], [2, 2], [4, 2], [9, 8]], ids=str)
@pytest.mark.parametrize("padding", [[0, 0], [1, 1]], ids=str)
@pytest.mark.parametrize("how", [(False, True, None), (True, False, None), (True, True, 7)], ids=str)
def test_avg_pool2d(kernel: list[int], padding: list[int], how: Any) -> None:
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    args = (kernel, [2, 2], padding, *how)
    assert_same(A.avg_pool2d.default, x, *args)
    assert_same(A.avg_pool2d_backward.default, torch.randn_like(A.avg_pool2d(x, *args)), x, *args)


def test_avg_pool_dtypes() -> None:
    x = torch.randint(-90, 90, (2, 3, 9, 8))
    assert_same(A.avg_pool2d.default, x, [3, 3], [2, 2], [1, 1])
    assert_same(A.avg_pool2d.default, x, [3, 3], [2, 2], [1, 1], False, True, -7)
    assert_same(A.avg_pool2d.default, x.bfloat16(), [3, 3], [2, 2], [1, 1], True, False)
    y = torch.randn(2, 5, 6, 7, dtype=torch.float64)
    args = ([2, 3, 2], [1, 2, 2], [0, 1, 1], True, False, None)
    assert_same(A.avg_pool3d.default, y, *args)
    assert_same(A.avg_pool3d_backward.default, torch.randn_like(A.avg_pool3d(y, *args)), y, *args)


@pytest.mark.parametrize("out", [[3, 4], [4, 3], [1, 1], [9, 8], [12, 5]], ids=str)
def test_adaptive(out: list[int]) -> None:
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    assert_same(A._adaptive_avg_pool2d.default, x, out)
    assert_same(A._adaptive_avg_pool2d_backward.default, torch.randn(2, 3, *out, dtype=torch.float64), x)
    assert_same(A.adaptive_max_pool2d.default, image(), out)
    y, index = A.adaptive_max_pool2d(x, out)
    assert_same(A.adaptive_max_pool2d_backward.default, torch.randn_like(y), x, index)


def test_adaptive3d() -> None:
    x = torch.randn(2, 5, 6, 7, dtype=torch.float64)
    assert_same(A._adaptive_avg_pool3d.default, x, [2, 6, 3])
    assert_same(A._adaptive_avg_pool3d_backward.default, torch.randn(2, 2, 6, 3, dtype=torch.float64), x)
    y, index = A.adaptive_max_pool3d(x, [2, 6, 3])
    assert_same(A.adaptive_max_pool3d.default, x, [2, 6, 3])
    assert_same(A.adaptive_max_pool3d_backward.default, torch.randn_like(y), x, index)


def test_an_index_beyond_the_image_writes_nothing() -> None:
    x = torch.randn(1, 1, 4, 4)
    index = torch.tensor([[[[99, -7], [2, 3]]]])
    args = ([3, 3], [2, 2], [1, 1], [1, 1], False, index)
    got = lowered(A.max_pool2d_with_indices_backward.default, x, torch.ones(1, 1, 2, 2), x, *args)[0]
    assert got.sum() == 2 and got[0, 0, 0, 2] == 1 and got[0, 0, 0, 3] == 1


@pytest.mark.parametrize("name", ["nn.functional.max_pool1d", "nn.functional.avg_pool1d", "nn.functional.avg_pool3d",
                                  "nn.functional.adaptive_avg_pool1d", "nn.functional.adaptive_max_pool1d"])
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float64], limit=3)
    assert mode.checked and not mode.problems


def test_images_are_padded_before_the_first_pass() -> None:
    """Not between passes, where each element would be asked whether it is padding."""
    axes = (pool_windows.Axis(9, 5, 3, 2, 1), pool_windows.Axis(8, 4, 3, 2, 1))
    for windows in (pool_windows.max_windows, pool_windows.sum_windows):
        steps = [e.primitive.name for e in jax.make_jaxpr(lambda x, f=windows: f(x, axes))(jnp.ones((2, 9, 8))).eqns]
        assert steps.count("pad") == 2
        assert max(i for i, s in enumerate(steps) if s == "pad") < steps.index("slice")
