"""Reductions against eager: sums, extrema with NaN and ties, moments, norms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fused_eager import fused_eager

from .edges import assert_agrees
from .errors import assert_same, eager, lowered
from .harness import LoweringCheck, sweep

INF, NAN = float("inf"), float("nan")
A = torch.ops.aten


@pytest.mark.parametrize(
    "names,dtypes",
    [
        (["sum", "mean", "prod"], [torch.float32, torch.float16, torch.int32, torch.bool, torch.complex64]),
        (["amax", "amin", "aminmax", "argmax", "argmin"], [torch.float32, torch.uint8]),
        (["any", "all", "count_nonzero", "nansum", "trace"], [torch.float32, torch.uint8]),
        (["var", "std_mean", "logsumexp"], [torch.bfloat16, torch.float64]),
        (["linalg.vector_norm", "dist", "renorm", "hash_tensor"], [torch.float32]),
    ],
)
def test_corpus(names: list[str], dtypes: list[torch.dtype]) -> None:
    mode = sweep(names, dtypes, limit=3, backward=False)
    assert not mode.problems
    assert mode.checked


def check() -> LoweringCheck:
    return LoweringCheck()


@pytest.mark.parametrize("shape", [(5, 5, 10), (31, 31), (2, 16, 3, 7, 8), (31, 31, 31), (32, 32), (7, 31, 3)], ids=str)
def test_sums_of_equal_numbers_along_several_axes(shape: tuple[int, ...]) -> None:
    """One after another, every addition would be rounded the same way."""
    x = torch.full(shape, 0.2)
    for dim in (tuple(range(x.ndim)), (0, x.ndim - 1)):
        for op in (A.sum.dim_IntList, A.mean.dim, A.nansum.default):
            assert_agrees(op, x, dim, rtol=1.3e-6, atol=0.0)


@pytest.mark.parametrize("dim", [(2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.nansum])
def test_a_sum_begins_with_zero(function: Callable[..., torch.Tensor], dim: tuple[int, ...]) -> None:
    """Of one number too, that is -0: XLA makes no sum of it."""
    x = torch.full((2, 3, 1), -0.0)
    with fused_eager(native="never", compile="wait"):
        found = function(x, dim)
    assert torch.equal(torch.signbit(found), torch.signbit(function(x, dim)))


def test_sums_accumulate_and_convert_as_torch_does() -> None:
    with check() as mode:
        torch.full((300,), 1000.0).half().sum()
        torch.full((70000,), 1.0).half().sum(dtype=torch.float32)
        torch.tensor([2**62, 2**62]).sum()
        torch.randn(3).sum(dtype=torch.int32)
        torch.tensor([1 + 2j]).sum(dtype=torch.float32)
        torch.ones(3, dtype=torch.bool).sum(dtype=torch.bool)
        torch.ones(3, dtype=torch.bool).prod(dtype=torch.bool)
        torch.ones(2, 0, 3).sum(1)
        torch.ones(2, 0).prod(1)
        torch.ones(2, 0).mean(1)
        torch.tensor([1.0, INF, -INF]).sum()
    assert not mode.problems and len(mode.checked) >= 5


def test_means_are_divisions() -> None:
    for n in (3, 7, 49):
        x = torch.full((n,), 0.1, dtype=torch.float64)
        (got,) = lowered(A.mean.default, x.mean(), torch.ones(n, dtype=torch.float64))
        assert got.item() == 1.0


SPECIAL = torch.tensor([[1.0, NAN, 3.0, NAN], [2.0, 2.0, 1.0, 2.0], [-INF, -INF, -INF, -INF], [0.0, -0.0, 0.0, 0.0]])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extrema_with_nan_and_ties(dim: int, dtype: torch.dtype) -> None:
    x = SPECIAL.to(dtype)
    for op in (A.max.dim, A.min.dim, A.argmax.default, A.argmin.default):
        assert_same(op, x, dim)
        assert_same(op, x, dim, True)


def test_argmax_beyond_the_float32_integers() -> None:
    # Positions travel as float32 up to 2**24 and as integers above.
    x = torch.zeros(2**24 + 9, dtype=torch.int8)
    x[2**24 + 3] = 1
    assert_same(A.argmax.default, x)


def test_extrema_of_integers_and_booleans() -> None:
    wide = torch.tensor([2**63 - 1, -(2**63), 2**53 + 1, 2**53])
    for x in (wide, torch.tensor([True, False, True]), torch.tensor([3, 200, 200], dtype=torch.uint8)):
        assert_same(A.max.dim, x, 0)
        assert_same(A.min.dim, x, 0)
        assert_same(A.amax.default, x)
        assert_same(A.amin.default, x)


def test_extrema_of_empty_rows() -> None:
    x = torch.empty(0, 3)
    assert_same(A.argmax.default, x, 1)
    assert_same(A.max.dim, x, 1)
    assert_same(A.amax.default, x, [1])


def test_truth() -> None:
    x = torch.tensor([[NAN, 0.0], [0.0, 0.0]])
    for op in (A.any, A.all):
        assert_same(op.default, x)
        assert_same(op.dim, x, 1, True)
        assert_same(op.dims, x, [0, 1])
        assert_same(op.dims, x, [])
        assert_same(op.dims, x)
    assert_same(A.any.default, torch.tensor([3, 0], dtype=torch.uint8))


@pytest.mark.parametrize("correction", [None, 0, 1, 4, 5, 0.5])
def test_corrections(correction: float | None) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert_same(A.var.correction, x, [1], correction=correction)
    assert_same(A.std_mean.correction, x, None, correction=correction)
    assert_same(A.var.correction, torch.randn(3, 4, dtype=torch.complex128), [1], correction=correction)


def test_variance_is_exact_about_constants_and_large_means() -> None:
    assert lowered(A.var.correction, torch.empty(()), torch.full((49,), 0.3))[0].item() == 0
    x = torch.randn(1000) + 1e4
    got = lowered(A.var.correction, torch.empty(()), x)[0]
    torch.testing.assert_close(got, x.double().var().float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [0, 1, 2, 3, 2.5, -1, INF, -INF])
def test_norms(p: float) -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [NAN, 1.0, 2.0], [INF, 1.0, 2.0]], dtype=torch.float64)
    assert_same(A.linalg_vector_norm.default, x, p, [1])
    assert_same(A.linalg_vector_norm.default, x[:1].to(torch.complex128) * 1j, p, [1], True)
    assert_same(A._foreach_norm.Scalar, [x, x[0], torch.tensor(3.0)], p)
    assert_same(A.dist.default, x[0], torch.ones(3, dtype=torch.float64), p)


def test_norms_of_single_numbers_do_not_underflow() -> None:
    assert_same(A.linalg_vector_norm.default, torch.tensor([[1e-30], [1e-40]]), 2, [1])


def test_norms_with_a_dtype() -> None:
    x = [torch.randn(5).bfloat16(), torch.randn(2, 3).bfloat16()]
    assert_same(A._foreach_norm.Scalar, x, 2, torch.float32)
    assert_same(A.linalg_vector_norm.default, x[1], 1, [0], dtype=torch.float32)
    assert_same(A.norm.ScalarOpt_dim_dtype, x[1], 2, [0], False, dtype=torch.float32)


def test_logsumexp_at_infinity() -> None:
    for row in ([-INF, -INF], [INF, 1.0], [NAN, 1.0], [1000.0, 1000.0]):
        assert_same(A.logsumexp.default, torch.tensor(row), [0])
    assert_same(A.logsumexp.default, torch.empty(2, 0), [1])
    assert_same(A.logsumexp.default, torch.tensor([1, 2, 3]), [0])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (4, 2), (2, 5)])
def test_trace(shape: tuple[int, int]) -> None:
    assert_same(A.trace.default, torch.randint(0, 9, shape))


def test_histograms() -> None:
    assert_same(A.histc.default, torch.tensor([0.0, 0.5, 1.0, NAN, 2.0, 2.1, -1.0]), 4, 0, 2)
    assert_same(A.histc.default, torch.randn(100), 7)
    assert_same(A.histc.default, torch.ones(5), 3)
    assert_same(A.histc.default, torch.tensor([]), 4)


@pytest.mark.parametrize("ends", [(1.0, INF), (-INF, 2.5e-7), (123456.789, INF), (INF, INF), (-INF, -INF), (NAN, 1.0)])
def test_histograms_of_what_has_no_range(ends: tuple[float, float]) -> None:
    x = torch.tensor(ends)
    want = eager(A.histc.default, x)
    assert isinstance(want, tuple) and "is not finite" in want[1]
    assert lowered(A.histc.default, torch.empty(100), x) == want


def test_renorm_of_zero_rows() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.1, 0.1]])
    assert_same(A.renorm.default, x, 2, 0, 1.0)
    assert_same(A.renorm.default, x.bfloat16(), 1.5, 1, 2)




def test_a_mean_with_infinities_is_eagers_running_one() -> None:
    for row in ([INF, 1.0, 2.0], [1.0, -INF, 2.0], [INF, INF, -INF], [1.0, NAN, 2.0]):
        x = torch.tensor([row, [1.0, 2.0, 4.0]])
        assert_same(A.var_mean.correction, x, [1], correction=1)
        assert_same(A.std_mean.correction, x, [1], correction=0)
