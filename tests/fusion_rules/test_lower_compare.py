"""Comparisons, logic, bits and clamps against eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering

from .edges import FLOATS, INTS, assert_agrees, grid
from .errors import lowered
from .harness import sweep

A = torch.ops.aten
BOUNDS: list[tuple[Any, Any]] = [
    (0, 1), (-1, None), (None, 2.5), (3, 1), (math.nan, 1.0), (0.0, math.nan), (math.nan, None), (None, math.nan),
    (0.0, -0.0), (-0.7, 0.7),
]


@pytest.mark.parametrize("name", [
    "eq", "lt", "logical_and", "logical_not", "bitwise_xor", "bitwise_not", "isfinite", "isreal", "isclose", "where",
    "clamp", "clamp_min", "clamp_max", "nan_to_num", "__rand__",
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_sweep(name: str, dtype: torch.dtype) -> None:
    mode = sweep([name], [dtype], limit=1)
    assert not mode.problems


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(name: str, dtype: torch.dtype) -> None:
    assert_agrees(getattr(A, name).Tensor, *grid(dtype, 2))


@pytest.mark.parametrize("number", [0.7, -1, math.nan, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8], ids=str)
def test_a_number_is_compared_in_the_tensors_dtype(dtype: torch.dtype, number: float) -> None:
    if dtype.is_floating_point or isinstance(number, int):
        x = torch.cat([*grid(dtype), torch.tensor([0.7, 127]).to(dtype)])
        for op in (A.eq.Scalar, A.le.Scalar, A.gt.Scalar):
            assert_agrees(op, x, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_logic(name: str, dtype: torch.dtype) -> None:
    assert_agrees(getattr(A, f"logical_{name}").default, *grid(dtype, 2))
    if not dtype.is_floating_point:
        assert_agrees(getattr(A, f"bitwise_{name}").Tensor, *grid(dtype, 2))


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_shifts_beyond_the_width(dtype: torch.dtype) -> None:
    for op in (A.bitwise_left_shift.Tensor, A.bitwise_right_shift.Tensor):
        assert_agrees(op, *grid(dtype, 2))
    for distance in (7, 64, -1):
        assert_agrees(A.bitwise_right_shift.Tensor_Scalar, *grid(dtype), distance)


def test_shifts_of_bools_are_left_to_eager() -> None:
    x = torch.tensor([True])
    with pytest.raises(NoLowering, match="rules of their own"):
        lowered(A.bitwise_left_shift.Tensor, torch.tensor([1]), x, x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["isinf", "isnan", "isneginf", "isposinf", "signbit"])
def test_kinds_of_numbers(name: str, dtype: torch.dtype) -> None:
    assert_agrees(getattr(A, name).default, *grid(dtype))


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_clamp(low: Any, high: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_agrees(A.clamp.default, *grid(dtype), low, high)
    if not any(isinstance(b, float) and math.isnan(b) for b in (low, high)):
        assert_agrees(A.clamp.default, *grid(torch.int32), low, high)


def test_clamp_by_tensors() -> None:
    assert_agrees(A.clamp.Tensor, *(t[:20000] for t in grid(torch.float32, 3)))
    for op in (A.clamp_min.Tensor, A.clamp_max.Tensor):
        assert_agrees(op, *grid(torch.bfloat16, 2))


@pytest.mark.parametrize("named", [{}, {"nan": 1.5}, {"nan": 0.7, "posinf": 2.0, "neginf": -0.3}])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_nan_to_num(dtype: torch.dtype, named: dict[str, float]) -> None:
    assert_agrees(A.nan_to_num.default, *grid(dtype), **named)


def test_where_promotes_and_broadcasts() -> None:
    assert_agrees(A.where.self, torch.tensor([[True], [False]]), torch.arange(3), torch.tensor(0.5))
    assert_agrees(A.where.self, torch.tensor([1, 0], dtype=torch.uint8), torch.ones(2), torch.tensor(2.0).double())
