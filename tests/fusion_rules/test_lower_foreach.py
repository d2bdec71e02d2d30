"""`_foreach_*` and gradient scaling against eager, with lists of mixed shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.rule import rule_for

from .edges import assert_agrees

A = torch.ops.aten
UNARY = [
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
    "clone",
    "zero",
]
# Rows of other families, and what ATen itself cannot run.
ELSEWHERE = {"aten._foreach_powsum.Scalar"}


def tensors(seed: int = 0, *dtypes: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    kinds = dtypes or (torch.float32, torch.float32, torch.bfloat16, torch.float64)
    return [(torch.rand(s, generator=g) + 0.25).to(d) for s, d in zip([(3, 4), (), (5,), (0, 2)], kinds, strict=True)]


def overload(name: str) -> Any:
    if not hasattr(A, name):
        pytest.skip(f"this torch has no {name}")
    return getattr(A, name).default


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    op = overload(f"_foreach_{name}")
    assert_agrees(op, tensors(), atol=1e-6 if name == "lgamma" else 1e-7)  # lgamma has zeros at 1 and 2


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "clamp_max", "clamp_min", "maximum", "minimum", "pow"])
def test_binary(name: str) -> None:
    packet, x, y = getattr(A, f"_foreach_{name}"), tensors(0), tensors(1)
    assert_agrees(packet.Scalar, x, 0.7)
    assert_agrees(packet.ScalarList, x, [0.7, 2, -1.5, 3.0])
    assert_agrees(packet.List, x, y)


def test_alpha_and_single_tensors() -> None:
    x, y = tensors(0), tensors(1)
    assert_agrees(A._foreach_add.List, x, y, alpha=0.3)
    assert_agrees(A._foreach_sub.List, x, y, alpha=2)
    for packet in (A._foreach_add, A._foreach_mul, A._foreach_div):
        assert_agrees(packet.Tensor, x, torch.tensor(0.7))
    assert_agrees(A._foreach_add.Tensor, x, torch.tensor(0.7), alpha=3)


def test_integers_with_fractions_become_floats() -> None:
    x = [torch.arange(4), torch.arange(3, dtype=torch.int32)]
    assert_agrees(A._foreach_add.Scalar, x, 0.5)
    assert_agrees(A._foreach_add.Scalar, x, 2)
    assert_agrees(A._foreach_div.ScalarList, x, [2, 0.5])


def test_integers_stay_integers_beside_a_factor_with_a_fraction() -> None:
    x = [torch.arange(4) + 2**53, torch.arange(3, dtype=torch.int32)]
    assert_agrees(A._foreach_addcmul.Scalar, x, x, x, 2.7)
    assert_agrees(A._foreach_addcmul.ScalarList, x, x, x, [0.5, 2])
    assert_agrees(A._foreach_addcmul.Tensor, x, x, x, torch.tensor([2.7, -1.5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.uint8, torch.float64], ids=str)
def test_numbers_in_a_tensor_of_every_kind(dtype: torch.dtype) -> None:
    x, numbers = [torch.ones(3).to(dtype), torch.ones(2, 2).to(dtype)], torch.tensor([2.7, 1.5]).to(dtype)
    assert_agrees(A._foreach_addcmul.Tensor, x, x, x, numbers)
    if dtype != torch.uint8:
        assert_agrees(A._foreach_addcdiv.Tensor, x, x, x, numbers)


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_ternary(name: str) -> None:
    packet, (x, y, z) = getattr(A, f"_foreach_{name}"), (tensors(i) for i in range(3))
    assert_agrees(packet.Scalar, x, y, z)
    assert_agrees(packet.Scalar, x, y, z, -0.3)
    assert_agrees(packet.ScalarList, x, y, z, [0.5, -2, 1.0, 3])
    assert_agrees(packet.Tensor, x, y, z, torch.tensor([0.5, -2, 1.0, 3]))


def test_lerp_pow_and_copies() -> None:
    x, y, w = (tensors(i) for i in range(3))
    assert_agrees(A._foreach_lerp.List, x, y, w)
    assert_agrees(A._foreach_lerp.Scalar, x, y, 0.1)
    assert_agrees(A._foreach_lerp.ScalarList, x, y, [0.1, 0.9, 0.5, 1.0])
    assert_agrees(A._foreach_pow.ScalarAndTensor, 2, x)
    assert_agrees(A._foreach_copy.default, x, [t.double() for t in y])
    assert_agrees(A._foreach_max.default, x[:3])


def test_products() -> None:
    assert_agrees(overload("_foreach_mm"), [torch.randn(2, 3)], [torch.randn(3, 4)], atol=1e-6)


@pytest.mark.parametrize(("bad", "scale"), [(1.0, 0.5), (float("inf"), 0.5), (float("nan"), 1.0)])
def test_unscale(bad: float, scale: float) -> None:
    grads = [torch.tensor([1.0, bad]), torch.tensor([3.0])]
    assert_agrees(A._amp_foreach_non_finite_check_and_unscale.default, grads, torch.zeros(1), torch.tensor(scale))


@pytest.mark.parametrize(("tracker", "found", "scale"), [(0, 0.0, 8.0), (1, 0.0, 8.0), (1, 1.0, 8.0), (1, 0.0, 3e38)])
def test_update_scale(tracker: int, found: float, scale: float) -> None:
    args: list[Any] = [torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(found)]
    assert_agrees(A._amp_update_scale.default, *args, 2.0, 0.5, 2)


def test_every_functional_overload_has_a_row() -> None:
    found = [
        op
        for name in dir(A)
        if name.startswith("_foreach_")
        for o in getattr(A, name).overloads()
        if not (op := getattr(getattr(A, name), o))._schema.is_mutable
    ]
    assert {str(op) for op in found if rule_for(op) is None} <= ELSEWHERE
