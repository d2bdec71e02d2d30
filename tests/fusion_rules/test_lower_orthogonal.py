"""Orthogonal polynomials against eager, and degrees that make no sense."""

from __future__ import annotations

import math

import pytest
import torch

from .edges import assert_agrees
from .harness import sweep

A = torch.ops.aten
POLYNOMIALS = [
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
    "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
]


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_sweep(name: str) -> None:
    mode = sweep([f"special.{name}"], [torch.float32], limit=1)
    assert mode.checked and not mode.problems


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(500, dtype=dtype) * 1.2, torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=dtype)])
    n = torch.randint(-2, 16, x.shape).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-8
    assert_agrees(getattr(A, f"special_{name}").default, x, n, rtol=tolerance, atol=tolerance, signs=False)


def test_polynomials_of_absurd_degree_end() -> None:
    x, n = torch.tensor([2.0, 0.5, 1.0, 0.3]), torch.tensor([1e6, 200.0, 1e9, math.inf])
    assert_agrees(A.special_hermite_polynomial_h.default, x[:2], n[:2])
    assert_agrees(A.special_legendre_polynomial_p.default, x[1:3], n[1:3], rtol=1e-4)
