"""Fourier transforms against ATen, for every normalisation."""

from __future__ import annotations

import pytest
import torch

from .errors import assert_keeps_nan, assert_same
from .harness import sweep

A = torch.ops.aten
NORMALIZATIONS = [0, 1, 2]


@pytest.mark.parametrize("dim", [[0], [1, 3], [2, 0, 1], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_complex(dim: list[int], normalization: int) -> None:
    x = torch.randn(3, 4, 5, 2, dtype=torch.complex128)
    for forward in (True, False):
        assert_same(A._fft_c2c.default, x, dim, normalization, forward)


@pytest.mark.parametrize("dim", [[0], [3], [1, 2], [3, 0, 1, 2]], ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_real(dim: list[int], normalization: int) -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    for onesided in (True, False):
        assert_same(A._fft_r2c.default, x, dim, normalization, onesided)
    half = A._fft_r2c(x, dim, 0, True)
    for size in (x.shape[dim[-1]], x.shape[dim[-1]] + 1 if x.shape[dim[-1]] % 2 == 0 else x.shape[dim[-1]] - 1):
        assert_same(A._fft_c2r.default, half, dim, normalization, size)


def test_the_imaginary_part_of_the_mean_does_not_count() -> None:
    half = torch.randn(4, dtype=torch.complex128)
    assert_same(A._fft_c2r.default, half, [0], 0, 6)


def test_float32_and_large_primes() -> None:
    x = torch.randn(2, 101)
    assert_same(A._fft_r2c.default, x, [1], 2, True)


@pytest.mark.parametrize("name", ["fft.fft", "fft.irfftn", "fft.hfft2", "fft.ihfft", "fft.rfft2"])
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float64], limit=2)
    assert mode.checked and not mode.problems


def test_infinities_are_no_sum() -> None:
    x = torch.randn(31, dtype=torch.complex64)
    x[3] = float("inf")
    assert_keeps_nan(A._fft_c2r.default, x, [0], 0, 60)
