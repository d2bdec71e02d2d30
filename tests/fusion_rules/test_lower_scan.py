"""Scans against eager, and the sequential form against the parallel one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.lower import lower
from fused_eager.fusion_rules.lowering import NoLowering
from fused_eager.fusion_rules.spec import Spec

from fused_eager.xla import enable_x64

from .errors import assert_same, lowered
from .harness import sweep

INF, NAN = float("inf"), float("nan")
A = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.complex64])
def test_corpus(dtype: torch.dtype) -> None:
    mode = sweep(["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"], [dtype], limit=2, backward=False)
    assert not mode.problems
    assert mode.checked


def test_float32_sums_are_eagers_bit_for_bit() -> None:
    x = torch.randn(3, 20000)
    assert torch.equal(lowered(A.cumsum.default, x, x, 1)[0], x.cumsum(1))
    assert torch.equal(lowered(A.cumprod.default, x, x, 0)[0], x.cumprod(0))


def test_partial_results_beyond_float32() -> None:
    # The running product is kept in float64, as ATen does: it comes back from 1e60.
    assert_same(A.cumprod.default, torch.tensor([1e30, 1e30, 1e-30]), 0)
    assert_same(A.cumprod.default, torch.tensor([0.0, 1e38, 1e38]), 0)


def test_negative_zero_and_infinities() -> None:
    x = torch.tensor([-0.0, -0.0])
    assert not lowered(A.cumsum.default, x, x, 0)[0].signbit().any()
    assert_same(A.cumsum.default, torch.tensor([INF, 1.0, -INF, 1.0]), 0)
    assert_same(A.logcumsumexp.default, torch.tensor([-INF, -INF, INF, 1.0, NAN]), 0)


@pytest.mark.parametrize("values", [[1.0, 3.0, 3.0, NAN, 5.0, NAN], [2.0, 2.0, 1.0, 1.0, -INF, -INF]])
def test_running_extrema_name_the_last(values: list[float]) -> None:
    for op in (A.cummax.default, A.cummin.default):
        assert_same(op, torch.tensor(values), 0)
        assert_same(op, torch.tensor(values).bfloat16().view(2, 3), 0)


def test_running_extrema_of_other_dtypes() -> None:
    for x in (torch.tensor([True, False, True]), torch.tensor([3, 200, 200], dtype=torch.uint8)):
        assert_same(A.cummax.default, x, 0)
        assert_same(A.cummin.default, x, 0)


def test_nothing_and_single_numbers() -> None:
    for x in (torch.empty(0), torch.empty(2, 0), torch.tensor(3.0)):
        for op in (A.cumsum.default, A.cumprod.default, A.logcumsumexp.default, A.cummax.default):
            assert_same(op, x, 0)


def test_integers_are_summed_in_64_bits() -> None:
    assert_same(A.cumsum.default, torch.full((300,), 200, dtype=torch.uint8), 0)
    assert_same(A.cumsum.default, torch.full((300,), 200, dtype=torch.uint8), 0, dtype=torch.int8)


def test_complex_logarithms_are_declined() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(NoLowering):
        lowered(A.logcumsumexp.default, x, x, 0)


@pytest.mark.parametrize("op", [A.cumsum.default, A.cumprod.default, A.logcumsumexp.default, A.cummax.default])
def test_both_forms_agree(op: Any) -> None:
    x = torch.randn(4, 33, dtype=torch.float64)
    want = op(x, 1)
    want = list(want) if isinstance(want, tuple) else [want]

    def run(device: str) -> Any:
        specs = tuple(Spec(tuple(w.shape), w.dtype, tuple(w.stride()), torch.device(device)) for w in want)
        return jax.jit(lambda v: lower(op, [v, 1], {}, specs)[0])(x.numpy())

    with enable_x64(True):
        for a, b, c in zip(run("cpu"), run("cuda"), want, strict=True):
            np.testing.assert_allclose(a, c.numpy(), rtol=1e-12)
            np.testing.assert_allclose(b, c.numpy(), rtol=1e-12)
