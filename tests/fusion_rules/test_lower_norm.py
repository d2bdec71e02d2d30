"""Layer, RMS, group and weight norm against eager, forward and backward."""

from __future__ import annotations

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering

from .errors import assert_same, lowered
from .harness import sweep

A = torch.ops.aten
MASKS = [[True, True, True], [True, False, False], [False, True, True]]


def some(mask: list[bool], results: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
    return [r for r, keep in zip(results, mask, strict=True) if keep and r is not None]


def test_corpus() -> None:
    names = ["native_layer_norm", "nn.functional.group_norm", "nn.functional.rms_norm"]
    mode = sweep(names, [torch.float32, torch.bfloat16], limit=2)
    assert not mode.problems
    assert mode.checked


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape,normalized", [((4, 7), [7]), ((2, 3, 4), [3, 4]), ((5,), [5]), ((0, 3), [3])])
def test_layer_norm(shape: tuple[int, ...], normalized: list[int], affine: bool) -> None:
    x, dy = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(normalized, dtype=torch.float64) if affine else None for _ in range(2))
    assert_same(A.native_layer_norm.default, x, normalized, weight, bias, 1e-5)
    _, mean, rstd = A.native_layer_norm(x, normalized, weight, bias, 1e-5)
    for mask in MASKS if affine else MASKS[1:2]:
        args = dy, x, normalized, mean, rstd, weight, bias, mask
        want = some(mask, A.native_layer_norm_backward(*args))
        got = lowered(A.native_layer_norm_backward.default, want, *args)
        torch.testing.assert_close(got, want)


def test_layer_norm_with_float32_parameters() -> None:
    x = torch.randn(4, 8).bfloat16()
    assert_same(A.native_layer_norm.default, x, [8], torch.rand(8), torch.rand(8), 1e-5)


def test_layer_norm_of_large_and_constant_rows() -> None:
    large = torch.randn(3, 64) + 1000
    # Float32 eager itself is off by 1e-4 here, so the truth is float64's.
    want = [w.float() for w in A.native_layer_norm(large.double(), [64], None, None, 1e-5)]
    got = lowered(A.native_layer_norm.default, want, large, [64], None, None, 1e-5)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [3, 7, 64, 1000])
@pytest.mark.parametrize("value", [0.3, 3.0, -1e5 / 3, 1e-20])
def test_normalised_constant_rows_are_0_exactly(value: float, width: int) -> None:
    constant = torch.full((2, width), value)
    want = list(A.native_layer_norm(constant, [width], None, None, 1e-5))
    got = lowered(A.native_layer_norm.default, want, constant, [width], None, None, 1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_the_gradient_of_normalising_one_number_is_declined() -> None:
    x = torch.randn(3, 1)
    args = x, x, [1], x, torch.full((3, 1), 300.0), None, None, [True, False, False]
    with pytest.raises(NoLowering):
        lowered(A.native_layer_norm_backward.default, x, *args)


@pytest.mark.parametrize("weight", [None, torch.rand(7, dtype=torch.float64)])
def test_rms_norm(weight: torch.Tensor | None) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    out, rstd = A._fused_rms_norm(x.detach(), [7], weight, 1e-6)
    assert_same(A._fused_rms_norm.default, x.detach(), [7], weight, 1e-6)
    assert_same(A._fused_rms_norm.default, x.detach().float(), [7], None, None)
    # ATen has the backward op for other devices only: compare with autograd.
    scale = (torch.ones(7, dtype=torch.float64) if weight is None else weight).clone().requires_grad_()
    dy = torch.randn_like(out)
    (x * (x * x).mean(-1, True).add(1e-6).rsqrt() * scale).backward(dy)
    assert x.grad is not None and scale.grad is not None
    want = [x.grad] if weight is None else [x.grad, scale.grad]
    mask = [True, weight is not None]
    got = lowered(A._fused_rms_norm_backward.default, want, dy, x.detach(), [7], rstd, weight, mask)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("group", [1, 2, 6])
def test_group_norm(group: int, affine: bool) -> None:
    x, dy = (torch.randn(3, 6, 2, 2, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.rand(6, dtype=torch.float64) if affine else None for _ in range(2))
    sizes = 3, 6, 4, group
    assert_same(A.native_group_norm.default, x, weight, bias, *sizes, 1e-5)
    _, mean, rstd = A.native_group_norm(x, weight, bias, *sizes, 1e-5)
    for mask in MASKS if affine else MASKS[1:2]:
        args = dy, x, mean, rstd, weight, *sizes, mask
        want = some(mask, A.native_group_norm_backward(*args))
        torch.testing.assert_close(lowered(A.native_group_norm_backward.default, want, *args), want)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim: int) -> None:
    v = torch.randn(6, 4, 3)
    g = torch.rand([n if d == dim else 1 for d, n in enumerate(v.shape)])
    assert_same(A._weight_norm_interface.default, v, g, dim)
    w, norms = A._weight_norm_interface(v, g, dim)
    assert_same(A._weight_norm_interface_backward.default, torch.randn_like(w), v, g, norms, dim)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_statistics_of_what_is_no_number(value: float) -> None:
    x = torch.randn(2, 6, 3)
    x[0, 1, 1] = value
    assert_same(A.native_layer_norm.default, x, [6, 3], None, None, 1e-5)
    assert_same(A.native_group_norm.default, x, None, None, 2, 6, 3, 2, 1e-5)
