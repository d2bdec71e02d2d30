"""Functions of one number against eager: op_db, corners, and what has to be exact."""

from __future__ import annotations

import pytest
import torch

from .edges import FLOATS, assert_agrees, grid
from .harness import sweep

A = torch.ops.aten
ROUNDING = [
    "abs", "ceil", "floor", "neg", "round", "sgn", "sign", "trunc",
]
SMOOTH = [
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "deg2rad", "exp", "exp2", "expm1", "log",
    "log10", "log1p", "log2", "rad2deg", "reciprocal", "rsqrt", "sigmoid", "sin", "sinc", "sinh", "sqrt", "tan",
    "tanh",
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", [*ROUNDING, *SMOOTH, "frac", "frexp", "positive", "square"])
def test_sweep(name: str) -> None:
    # The derivative of sgn is a ZeroTensor, which `assert_close` cannot read.
    mode = sweep([name], [torch.float32], limit=1, backward=name != "sgn")
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("name", ["abs", "acosh", "exp", "log10", "sgn", "sigmoid", "sqrt", "tanh"])
def test_sweep_complex(name: str) -> None:
    mode = sweep([name], [torch.complex64], limit=1, backward=False)
    assert mode.checked and not mode.problems


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*ROUNDING, *SMOOTH, "frac"])
def test_corners(name: str, dtype: torch.dtype) -> None:
    # XLA:CPU flushes what is too small for a normal number.
    assert_agrees(getattr(A, name).default, *grid(dtype), atol=0 if name in ROUNDING else 1e-37)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["exp", "sqrt", "reciprocal", "sinc"])
def test_integers_become_floats(name: str, dtype: torch.dtype) -> None:
    assert_agrees(getattr(A, name).default, *grid(dtype), atol=1e-37)


@pytest.mark.parametrize("name", [n for n in ROUNDING if n not in ("sgn", "neg")])
def test_integers_are_round_already(name: str) -> None:
    assert_agrees(getattr(A, name).default, *grid(torch.int32))


def test_logarithms_of_powers_are_whole() -> None:
    assert_agrees(A.log2.default, 2.0 ** torch.arange(-60, 61), rtol=0)
    assert_agrees(A.log10.default, 10.0 ** torch.arange(-30, 31, dtype=torch.float64), rtol=0)
    assert_agrees(A.exp2.default, torch.arange(-120.0, 128), rtol=0)


def test_hyperbolic_functions_keep_their_digits_up_to_overflow() -> None:
    x = torch.linspace(-88.5, 88.5, 4001)
    assert_agrees(A.cosh.default, x, rtol=1.3e-6)
    assert_agrees(A.sinh.default, x, rtol=1.3e-6)


@pytest.mark.parametrize("decimals", [2, 0, -1])
def test_round_decimals(decimals: int) -> None:
    assert_agrees(A.round.decimals, torch.randn(200) * 100, decimals=decimals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_frexp_takes_denormals_apart(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    tiny = torch.tensor([info.tiny / 4, -info.tiny / 8, info.tiny, info.max], dtype=dtype)
    assert_agrees(A.frexp.Tensor, torch.cat([tiny, *grid(dtype)]), rtol=0)


def test_the_direction_of_a_complex_zero_has_no_sign() -> None:
    x = torch.complex(torch.tensor([0.0, -0.0, -0.0, 3.0] * 16), torch.tensor([-0.0, 0.0, -0.0, -4.0] * 16))
    assert_agrees(A.sgn.default, x)
