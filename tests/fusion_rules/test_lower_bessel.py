"""Bessel and Airy functions against eager."""

from __future__ import annotations

import pytest
import torch

from .edges import assert_agrees, grid
from .harness import sweep

A = torch.ops.aten
NAMES = [
    "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "bessel_j0",
    "bessel_j1", "bessel_y0", "bessel_y1", "airy_ai", "spherical_bessel_j0",
]


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([f"special.{name}"], [torch.int32], limit=1)
    assert mode.checked and not mode.problems


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    seams = torch.tensor([2.0, 2.09, -2.09, 5.0, -5.0, 8.33, 103.8, 104.0, 1e-5, 1e-6, 0.5], dtype=dtype)
    x = torch.cat([torch.randn(500, dtype=dtype), torch.randn(500, dtype=dtype) * 10, torch.rand(500, dtype=dtype),
                   seams, *grid(dtype)])
    rtol, atol = (2e-6, 1e-5) if dtype == torch.float32 else (1e-7, 1e-7)
    assert_agrees(getattr(A, f"special_{name}").default, x, rtol=rtol, atol=atol, signs=False)
