"""Arithmetic against eager: op_db, corners, division of integers, powers, and rounding in half precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering
from torch._ops import OpOverload

from .edges import FLOATS, INTS, assert_agrees, grid
from .errors import assert_same_error, lowered
from .harness import sweep

A = torch.ops.aten
NAMES = [
    "add", "sub", "mul", "div", "atan2", "copysign", "fmax", "fmin", "maximum", "minimum", "fmod", "remainder",
    "floor_divide", "ldexp", "logaddexp", "logaddexp2", "heaviside", "hypot", "nextafter", "pow", "float_power", "rsub",
    "addcmul", "addcdiv", "lerp", "__rpow__", "__rdiv__",
]
FOLDED = ["fmax", "fmin", "maximum", "minimum", "hypot", "logaddexp", "logaddexp2", "heaviside", "nextafter", "atan2"]


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float32], limit=1)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize(("name", "dtype"), [
    ("add", torch.complex64), ("div", torch.complex64), ("pow", torch.complex64), ("mul", torch.bool),
    ("gcd", torch.int32), ("lcm", torch.int64), ("floor_divide", torch.uint8), ("pow", torch.int64),
    ("addcmul", torch.int32), ("true_divide", torch.int32), ("add", torch.bfloat16), ("lerp", torch.float16),
], ids=str)
def test_sweep_other_dtypes(name: str, dtype: torch.dtype) -> None:
    mode = sweep([name], [dtype], limit=2, backward=False)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FOLDED)
def test_corners(name: str, dtype: torch.dtype) -> None:
    # bfloat16 has another fmax in eager, which takes the other one of 0.0 and -0.0.
    signs = not (name in ("fmax", "fmin") and dtype == torch.bfloat16)
    assert_agrees(getattr(A, name).default, *grid(dtype, 2), signs=signs, atol=1e-37)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [A.fmod.Tensor, A.remainder.Tensor], ids=str)
def test_remainders_of_quotients_that_are_infinite(op: OpOverload, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, largest / 4, 7.0, math.inf, math.nan] * 16, dtype=dtype)
    for y in (0.5, -0.5, 0.3):
        assert_agrees(op, x, torch.full_like(x, y))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [
    A.add.Tensor, A.mul.Tensor, A.div.Tensor, A.fmod.Tensor, A.remainder.Tensor, A.copysign.Tensor,
    A.floor_divide.default, A.pow.Tensor_Tensor,
], ids=str)
def test_arithmetic_corners(op: OpOverload, dtype: torch.dtype) -> None:
    assert_agrees(op, *grid(dtype, 2), atol=1e-37)


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_div_mode(dtype: torch.dtype, mode: str | None) -> None:
    x, y = grid(dtype, 2)
    y = y if dtype.is_floating_point else torch.where(y == 0, 5, y)
    assert_agrees(A.div.Tensor_mode, x, y, rounding_mode=mode)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("op", [A.remainder.Tensor, A.fmod.Tensor, A.floor_divide.default, A.pow.Tensor_Tensor,
                                A.gcd.default, A.lcm.default], ids=str)
def test_integers(op: OpOverload, dtype: torch.dtype) -> None:
    x, y = grid(dtype, 2)
    assert_agrees(op, x, torch.where(y == 0, 5, y))


@pytest.mark.parametrize("op", [A.remainder.Tensor, A.fmod.Tensor, A.floor_divide.default], ids=str)
def test_an_integer_over_zero_is_eagers_error(op: OpOverload) -> None:
    x, y = torch.tensor([1, 2]), torch.tensor([3, 0])
    assert_same_error(op, x, x, y)
    # Nothing is divided: nothing fails.
    assert_agrees(op, x[:0], y[:1] * 0)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, -3, 7, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16], ids=str)
def test_pow_by_number(dtype: torch.dtype, exponent: float) -> None:
    assert_agrees(A.pow.Tensor_Scalar, *grid(dtype), exponent, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_powers_of_zero(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    exponents = [3 - 2j, 0.5, 0, 2j, -1 + 1j, -2, complex(inf, 0), complex(-inf, 0), complex(1, inf), complex(0, nan)]
    n = torch.tensor(exponents, dtype=dtype)
    assert_agrees(A.pow.Tensor_Tensor, torch.zeros_like(n), n, signs=False)
    assert_agrees(A.pow.Tensor_Tensor, torch.ones_like(n), n.nan_to_num(2.0, 2.0, 2.0))
    for exponent in (0j, 1 + 0j, 2 + 0j, 1 - 2j, -1 + 1j):
        assert_agrees(A.pow.Tensor_Scalar, torch.zeros_like(n), exponent, signs=False)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_pow_of_integers_wraps(dtype: torch.dtype, exponent: int) -> None:
    assert_agrees(A.pow.Tensor_Scalar, *grid(dtype), exponent)


def test_pow_of_integers_by_negative_numbers_is_left_to_eager() -> None:
    x = torch.arange(4)
    with pytest.raises(NoLowering, match="negative powers"):
        lowered(A.pow.Tensor_Scalar, x, x, -1)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 0.7, 1.0, -1.0])
def test_lerp_measures_from_the_nearer_end(weight: float) -> None:
    x, y = grid(torch.float32, 2)
    assert_agrees(A.lerp.Scalar, x, y, weight)
    start, end = torch.randn(2, 4000).unbind()
    got = lowered(A.lerp.Scalar, start, start, end, 1.0)
    assert isinstance(got, list) and torch.equal(got[0], end)


HALF: list[tuple[OpOverload, list[Any], dict[str, Any]]] = [
    (A.add.Tensor, [0.7], {}), (A.sub.Tensor, [0.7], {}), (A.rsub.Scalar, [0.7], {}), (A.mul.Tensor, [0.7], {}),
    (A.div.Tensor, [0.7], {}), (A.fmod.Scalar, [0.7], {}), (A.remainder.Scalar, [0.7], {}),
    (A.floor_divide.default, [0.7], {}), (A.pow.Tensor_Scalar, [0.7], {}), (A.div.Tensor_mode, [0.7],
    {"rounding_mode": "trunc"}), (A.add.Tensor, ["y"], {"alpha": 0.7}), (A.sub.Tensor, ["y"], {"alpha": 0.7}),
    (A.div.Tensor_mode, ["y"], {"rounding_mode": "floor"}), (A.div.Tensor_mode, ["y"], {"rounding_mode": "trunc"}),
    (A.remainder.Tensor, ["y"], {}), (A.lerp.Scalar, ["y", 0.3], {}), (A.addcmul.default, ["y", "y"], {"value": 0.7}),
    (A.addcdiv.default, ["y", "y"], {"value": 0.7}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("op", "rest", "named"), HALF, ids=lambda v: str(v))
def test_half_precision_rounds_where_eager_rounds(
    op: OpOverload, rest: list[Any], named: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(4000) * 30).to(dtype), (torch.randn(4000) * 3).to(dtype)
    assert_agrees(op, x, *[y if r == "y" else r for r in rest], rtol=0, **named)


def test_alpha_one_costs_nothing_and_others_are_exact() -> None:
    x, y = torch.randn(64), torch.randn(64)
    for alpha in (1, -1, 0.1, 3):
        assert_agrees(A.add.Tensor, x, y, alpha=alpha, atol=1e-7)
    assert_agrees(A.add.Tensor, *grid(torch.uint8, 2), alpha=3)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_addcmul_casts_its_number_to_integers(dtype: torch.dtype) -> None:
    x, y = grid(dtype, 2)
    for value in (2.7, 0.5, 3):
        assert_agrees(A.addcmul.default, x, x, y, value=value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_quotients_of_special_values(dtype: torch.dtype) -> None:
    """Where eager has NaN, infinity or zero, so has the region."""
    inf, nan = math.inf, math.nan
    parts = [0.0, -0.0, 1.0, -2.5, 1e-30, 1e30, inf, -inf, nan]
    z = torch.tensor([complex(a, b) for a in parts for b in parts], dtype=dtype)
    x, y = z.repeat_interleave(len(z)), z.repeat(len(z))
    atol = 0.0 if dtype is torch.complex128 else 1e-37  # of which subnormal numbers come, which are zeros here
    assert_agrees(A.div.Tensor, x, y, atol=atol, signs=False)
    assert_agrees(A.reciprocal.default, z, atol=atol, signs=False)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_products_and_quotients_are_rounded_as_eager_rounds_them(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 64, 16, dtype=dtype).unbind(0)
    for op, args in [
        (A.div.Tensor, (x, y)), (A.div.Tensor, (x, y.real)), (A.reciprocal.default, (y,)),
        (A.addcdiv.default, (x, x, y)),
        (A.mul.Tensor, (x, y)), (A.mul.Tensor, (x, x.conj().clone())), (A.pow.Tensor_Scalar, (x, 2)),
        (A.addcmul.default, (x, y, x)), (A.mul.Tensor, (x, 2 + 3j)), (A.mul.Tensor, (x[0, :1], y[0, :1])),
    ]:
        want = op(*args)
        got = lowered(op, want, *args)
        assert isinstance(got, list) and torch.equal(got[0], want), op
