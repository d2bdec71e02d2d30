"""Copies, conversions and complex numbers against eager."""

from __future__ import annotations

import math

import pytest
import torch

from .edges import assert_agrees, grid
from .harness import sweep

A = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8,
          torch.uint8, torch.bool, torch.complex64]
VALUES = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 300.0, -129.0, 70001.0, -1.7, 2.5, 65519.9, 1e-3]


@pytest.mark.parametrize("name", ["clone", "real", "imag", "conj", "conj_physical", "angle", "complex", "polar",
                                  "view_as_real", "view_as_complex", "bfloat16", "long", "bool", "double"])
def test_sweep(name: str) -> None:
    problems = [p for d in (torch.float32, torch.complex64) for p in sweep([name], [d], limit=1).problems]
    assert not problems


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_every_conversion(target: torch.dtype) -> None:
    for source in DTYPES:
        values = torch.tensor(VALUES, dtype=torch.float64)
        if not (source.is_floating_point or source.is_complex):
            values = values.nan_to_num(0, 0, 0).clamp(0 if source == torch.uint8 else -100, 100)
        assert_agrees(A._to_copy.default, values.to(source).repeat(10), dtype=target, rtol=0)


def test_copy_broadcasts_and_converts() -> None:
    assert_agrees(A.copy.default, torch.ones(2, 3, dtype=torch.int32), torch.randn(3) * 9)
    assert_agrees(A.copy.default, torch.ones(2, dtype=torch.bfloat16), torch.tensor(0.7))


@pytest.mark.parametrize("op", [A.angle.default, A._conj_physical.default, A.clone.default, A.abs.default], ids=str)
def test_complex_corners(op: torch._ops.OpOverload) -> None:
    assert_agrees(op, torch.complex(*grid(torch.float32, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8], ids=str)
def test_angle_of_real_numbers(dtype: torch.dtype) -> None:
    assert_agrees(A.angle.default, *grid(dtype))


def test_parts_of_complex_numbers() -> None:
    x, y = grid(torch.float32, 2)
    assert_agrees(A.complex.default, x, y)
    assert_agrees(A.polar.default, x, y)
    assert_agrees(A.view_as_real_copy.default, torch.complex(x, y))
    assert_agrees(A.view_as_complex_copy.default, torch.stack([x, y], -1))
