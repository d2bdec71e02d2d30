"""Activation functions and their derivatives against eager, NaN and the seams of their pieces included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from .edges import FLOATS, INTS, assert_agrees, grid
from .harness import sweep

A = torch.ops.aten
NAMES = [
    "relu", "elu", "prelu", "celu", "selu", "silu", "hardsigmoid", "logsigmoid", "mish", "softsign", "tanhshrink",
    "threshold", "softshrink", "hardshrink", "hardtanh", "relu6", "softplus", "gelu", "glu", "leaky_relu", "hardswish",
]
# Arguments behind the incoming gradient and the input.
DERIVATIVES: dict[str, tuple[Any, ...]] = {
    "tanh_backward": (),
    "sigmoid_backward": (),
    "gelu_backward": (),
    "silu_backward": (),
    "mish_backward": (),
    "hardsigmoid_backward": (),
    "hardswish_backward": (),
    "softplus_backward": (1.5, 10.0),
    "hardtanh_backward": (-1, 2.0),
    "leaky_relu_backward": (0.1, False),
    "threshold_backward": (0.5,),
    "hardshrink_backward": (0.5,),
    "softshrink_backward": (0.5,),
}


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([f"nn.functional.{name}"], [torch.float32], limit=2)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("name", ["logit", "native_dropout_backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sweep_others(name: str, dtype: torch.dtype) -> None:
    mode = sweep([name], [dtype], limit=2)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [
    "relu", "hardsigmoid", "hardswish", "mish", "silu", "elu", "celu", "hardtanh", "leaky_relu", "hardshrink",
    "softplus", "logit",
])
def test_corners(name: str, dtype: torch.dtype) -> None:
    assert_agrees(getattr(A, name).default, *grid(dtype), atol=1e-37)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    # Eager makes NaN of infinity here, and cancels digits left of zero.
    x = torch.linspace(-9, 30, 2001)
    atol = 1e-6 if approximate == "none" else 5e-6  # 1 + tanh(u): a last digit of tanh, times x
    # Far to the left the sign of eager's zero depends on the processor: +0 with AVX2, -0 with AVX-512.
    assert_agrees(A.gelu.default, x, approximate=approximate, atol=atol, signs=False)
    assert_agrees(A.gelu_backward.default, torch.ones_like(x), x, approximate=approximate, atol=atol)


_CANCELS = {"gelu_backward": 1e-6, "mish_backward": 1e-7}  # they pass through zero as a difference of two terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([*grid(dtype), torch.randn(64, dtype=dtype) * 3])
    # ATen divides by 6.0f in hardsigmoid_backward, float64 or not.
    rtol, atol = (1e-7 if dtype == torch.float64 else 4e-6), _CANCELS.get(name, 1e-35)
    for grad in (torch.ones_like(x), torch.randn_like(x)):
        assert_agrees(getattr(A, name).default, grad, x, *DERIVATIVES[name], rtol=rtol, atol=atol, signs=False)


@pytest.mark.parametrize("from_result", [False, True])
def test_elu_backward(from_result: bool) -> None:
    x = torch.cat([*grid(torch.float32), torch.randn(64)])
    assert_agrees(A.elu_backward.default, torch.ones_like(x), 1.2, 1.1, 0.9, from_result, x, atol=1e-36)


@pytest.mark.parametrize("from_result", [False, True])
def test_a_gradient_that_becomes_infinite_on_the_way(from_result: bool) -> None:
    # As in eager an infinity times the slope, which is 0 far out, is NaN, whatever the other order would give.
    x = torch.tensor([-math.inf, -1000.0, -1.0, 0.0, 2.0, math.nan] * 16)
    assert_agrees(A.elu_backward.default, torch.full_like(x, 3e38), 1.5, 1.0, 1.0, from_result, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gelu_of_infinity_is_eagers(dtype: torch.dtype) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 2.0] * 16, dtype=dtype)
    assert_agrees(A.gelu.default, x, rtol=1e-2)


def test_hardswish_of_the_largest_numbers_is_infinite() -> None:
    assert_agrees(A.hardswish.default, torch.tensor([3e38, 1e38, -3e38, 5e37] * 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropped_numbers_leave_nan_and_signs(dtype: torch.dtype) -> None:
    grad = torch.tensor([math.nan, math.inf, -math.inf, -1.0, 1.0, -0.0] * 16, dtype=dtype)
    for mask in (torch.zeros(96, dtype=torch.bool), torch.arange(96) % 5 > 0):
        assert_agrees(A.native_dropout_backward.default, grad, mask, 2.0)


def test_dropped_whole_numbers_are_zeros_without_a_sign() -> None:
    grad, mask = torch.tensor([-3, 3, -(2**62), -1] * 16), torch.arange(64) % 3 > 0
    for dtype in (torch.int64, torch.int32, torch.bool):
        assert_agrees(A.native_dropout_backward.default, grad.to(dtype), mask, 2.0)


@pytest.mark.parametrize("eps", [None, 0.1, 0.5, 0.7, 1.5, -0.2, math.nan])
def test_logit_within_bounds_that_may_have_changed_places(eps: float | None) -> None:
    x = torch.tensor([-0.5, 0.0, 0.05, 0.1, 0.3, 0.6, 0.9, 0.95, 1.0, 1.5, math.nan, math.inf, -math.inf] * 8)
    assert_agrees(A.logit.default, x, eps, atol=1e-7)
    assert_agrees(A.logit.default, x.bfloat16(), eps, atol=1e-2)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_logit_of_integers(dtype: torch.dtype) -> None:
    x = torch.cat([*grid(dtype), torch.tensor([torch.iinfo(dtype).min], dtype=dtype)])
    for eps in (None, 0.1, 0.7):
        assert_agrees(A.logit.default, x, eps)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_threshold_of_integers(dtype: torch.dtype) -> None:
    x = torch.cat([*grid(dtype), torch.iinfo(dtype).max - torch.arange(3, dtype=dtype)])  # too large for floats
    for limit, value in ((0.5, 0), (2.7, 9.6), (1, 2.5), (3, 4), (0.5, -1)):
        assert_agrees(A.threshold.default, x, limit, value)
        assert_agrees(A.threshold_backward.default, x.flip(0), x, limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shrinking_measures_with_a_rounded_number(dtype: torch.dtype) -> None:
    x = torch.tensor([-0.1, 0.1, -0.3, 0.3, 0.7, 1.0] * 8, dtype=dtype)
    for lambd in (0.1, 0.3, 0.7):
        assert_agrees(A.hardshrink.default, x, lambd)
        assert_agrees(A.hardshrink_backward.default, torch.ones_like(x), x, lambd)
        assert_agrees(A.softshrink_backward.default, torch.ones_like(x), x, lambd)


@pytest.mark.parametrize("eps", [None, 0.1, 0.7, -0.2])
def test_logit_backward(eps: float | None) -> None:
    # With eps, eager's vectorised loop makes 0 of NaN and its scalar loop NaN.
    x = torch.tensor([-0.5, 0.0, 0.05, 0.1, 0.5, 0.9, 0.95, 1.0, 1.5, math.nan if eps is None else 0.2] * 8)
    assert_agrees(A.logit_backward.default, torch.full_like(x, 2.0), x, eps)


@pytest.mark.parametrize("eps", [None, 0.1])
def test_logit_backward_shows_nan(eps: float | None) -> None:
    x = torch.tensor([math.nan, 0.3, math.nan])  # too few for the vectorised loop
    assert_agrees(A.logit_backward.default, torch.full_like(x, 2.0), x, eps)


def test_log_sigmoid() -> None:
    x = torch.cat([*grid(torch.float32), torch.randn(64)])
    assert_agrees(A.log_sigmoid_forward.default, x, atol=1e-37)
    buffer = A.log_sigmoid_forward.default(x)[1]
    assert_agrees(A.log_sigmoid_backward.default, torch.ones_like(x), x, buffer, atol=1e-37)


def test_prelu_and_rrelu() -> None:
    x, grad = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    weight = torch.randn(1, 3, 1)
    assert_agrees(A._prelu_kernel.default, x, weight)
    assert_agrees(A._prelu_kernel_backward.default, grad, x, weight)
    for training in (True, False):
        assert_agrees(A.rrelu_with_noise_backward.default, grad, x, torch.rand_like(x), 0.1, 0.3, training, False)


@pytest.mark.parametrize("dim", [1, -2])
def test_gated_linear_unit_and_its_derivatives(dim: int) -> None:
    torch.manual_seed(0)
    x, dx, grad, dgrad = torch.randn(4, 6, 3), torch.randn(4, 6, 3), torch.randn(4, 3, 3), torch.randn(4, 3, 3)
    assert_agrees(A.glu.default, x, dim, atol=1e-6)
    assert_agrees(A.glu_backward.default, grad, x, dim, atol=1e-6)
    assert_agrees(A.glu_jvp.default, A.glu(x, dim), x, dx, dim, atol=1e-6)
    grad_x = A.glu_backward(grad, x, dim)
    assert_agrees(A.glu_backward_jvp.default, grad_x, grad, x, dgrad, dx, dim, atol=1e-6)
