"""Factories against eager: exact numbers, ranges, windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering
from fused_eager.fusion_rules.rule import hoisted_names

from .errors import assert_same, assert_same_bits, lowered
from .harness import LoweringCheck, sweep

A = torch.ops.aten


def test_corpus() -> None:
    names = ["full", "full_like", "new_full", "ones_like", "new_zeros", "fill", "arange", "eye", "linspace", "logspace"]
    mode = sweep(names, [torch.float32, torch.int64], limit=2, backward=False)
    assert not mode.problems
    assert mode.checked


def test_fill_values_are_inputs_and_exact() -> None:
    assert "fill_value" in hoisted_names(A.full.default) and "value" in hoisted_names(A.fill.Scalar)
    assert lowered(A.full.default, torch.full((2,), -0.0), [2], -0.0)[0].signbit().all()
    assert not lowered(A.full.default, torch.full((2,), 0.0), [2], 0.0)[0].signbit().any()
    assert_same(A.full.default, [3], 2**53 + 1)
    assert_same(A.full.default, [3], 0.1, dtype=torch.float64)
    assert_same(A.full.default, [3], True)
    assert_same(A.full.default, [3], 3 + 4j)
    assert_same(A.full.default, [3], float("nan"), dtype=torch.bfloat16)
    assert_same(A.scalar_tensor.default, 2.9, dtype=torch.int32)
    assert_same(A.fill.Scalar, torch.empty(2, dtype=torch.int32), -2.9)
    assert_same(A.fill.Scalar, torch.empty(2, dtype=torch.bool), 0.5)
    assert_same(A.fill.Tensor, torch.empty(2, dtype=torch.uint8), torch.tensor(300.0))
    assert_same(A.zero.default, torch.randn(2, 0))


def test_positions_that_grow_are_inputs() -> None:
    assert hoisted_names(A.arange.start) == hoisted_names(A.arange.start_step) - {"step"}
    assert not hoisted_names(A.arange.default)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_ranges(dtype: torch.dtype) -> None:
    with LoweringCheck() as mode:
        torch.arange(7, dtype=dtype)
        torch.arange(2, 2, dtype=dtype)
        torch.arange(9, -3, -2, dtype=dtype)
        torch.range(1, 4, dtype=dtype)
        if dtype.is_floating_point:
            torch.arange(0.5, 3, 0.3, dtype=dtype)
        for n in (0, 1, 2, 8, 13):
            torch.linspace(0, 100, n, dtype=dtype)
            torch.linspace(torch.tensor(-3), 7, n, dtype=dtype)
            torch.logspace(0, 3, n, base=2, dtype=dtype)
    assert not mode.problems and not mode.missing


def test_large_ranges() -> None:
    assert_same(A.arange.start, 2**40, 2**40 + 3)
    assert_same(A.arange.start, -(2**63), -(2**63) + 2)
    assert_same(A.arange.start_step, 0.0, 1.0, 0.001)
    assert_same(A.arange.default, 2**24 + 3, dtype=torch.float32)
    assert_same(A.linspace.default, 1 + 2j, 3 - 1j, 5)


@pytest.mark.parametrize("shape", [(0, 0), (3, 3), (2, 5), (5, 2)])
def test_eye(shape: tuple[int, int]) -> None:
    assert_same(A.eye.m, *shape, dtype=torch.complex64)
    assert_same(A.eye.default, shape[0])


def test_triangles_are_decomposed() -> None:
    with LoweringCheck() as mode:
        torch.tril_indices(4, 6, 1)
        torch.triu_indices(3, 4, -1)
    assert not mode.problems and not mode.missing


@pytest.mark.parametrize("window", [f"{name}_window" for name in ("hann", "hamming", "blackman", "bartlett", "kaiser")])
def test_windows(window: Any) -> None:
    with LoweringCheck() as mode:
        for n in (0, 1, 2, 9, 16):
            for periodic in (True, False):
                getattr(torch, window)(n, periodic)
        getattr(torch, window)(12, dtype=torch.float64)
        torch.hamming_window(7, True, 0.4, 0.6)
        for beta in (0.0, 3.0, -8.6, 80.0):
            torch.kaiser_window(9, True, beta)
    assert not mode.problems and not mode.missing


def test_half_windows_are_declined() -> None:
    with pytest.raises(NoLowering):
        lowered(A.hann_window.default, torch.empty(4).half(), 4, dtype=torch.float16)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_spaces_are_eagers_to_the_last_bit(dtype: torch.dtype) -> None:
    # Several of a length in one program: XLA then makes other instructions of the same formula.
    for n in (2, 3, 9, 10, 15, 16, 137, 1000):
        for first, last in ((93.56, -28.39), (-61.79, 13.5), (0, 1), (17.415, -32.946)):
            assert_same_bits(A.linspace.default, first, last, n, dtype=dtype)
        assert_same_bits(A.logspace.default, -0.61, 1.35, n, dtype=dtype)
        assert_same_bits(A.logspace.default, 0.17, 2.2, n, 2.0, dtype=dtype)


def test_complex_spaces_are_eagers_to_the_last_bit() -> None:
    for n in (3, 10, 137):
        assert_same_bits(A.linspace.default, 0.13 + 2j, 0.77 - 1.3j, n)
        assert_same_bits(A.linspace.default, 0.13, 0.77, n, dtype=torch.complex64)
    with pytest.raises(NoLowering):
        lowered(A.logspace.default, torch.logspace(1j, 2, 3), 1j, 2, 3)


def test_a_progression_downwards_starts_at_its_start() -> None:
    for start, end, step in [(0.0, -1.0, -0.25), (-0.0, -1.0, -0.5), (0.0, 1.0, 0.5)]:
        want = torch.arange(start, end, step)
        got = lowered(A.arange.start_step, want, start, end, step)
        assert torch.equal(got[0].signbit(), want.signbit()) and torch.equal(got[0], want)
