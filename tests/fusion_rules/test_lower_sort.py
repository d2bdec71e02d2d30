"""Sorting, ranks and search against eager: NaN, signed zeros, 64-bit keys, ties where torch defines them."""

from __future__ import annotations

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering

from .errors import assert_same, assert_same_error, lowered
from .harness import sweep

INF, NAN = float("inf"), float("nan")
A = torch.ops.aten
ROWS = torch.tensor([[1.0, NAN, -0.0, 0.0, -INF, INF, -NAN, 3, 3, -3], [0.0, 0, 1, 1, 2, 2, 0, 1, 2, 3]])
NAMES = ["sort", "topk", "kthvalue", "median", "nanmedian", "mode", "searchsorted", "bucketize", "isin"]


@pytest.mark.parametrize("names", [NAMES[:4], NAMES[4:]])
def test_corpus(names: list[str]) -> None:
    mode = sweep(names, [torch.float32, torch.int64], limit=4, backward=False)
    assert not mode.problems
    assert mode.checked


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_stable_sort_of_floats(dtype: torch.dtype, descending: bool) -> None:
    for dim in (0, 1):
        assert_same(A.sort.stable, ROWS.to(dtype), stable=True, dim=dim, descending=descending)


def test_sorted_zeros_keep_their_signs() -> None:
    x = torch.tensor([0.0, -0.0, -1.0, -0.0])
    values, order = lowered(A.sort.stable, list(x.sort(stable=True)), x, stable=True)
    assert order.tolist() == [2, 0, 1, 3] and values.signbit().tolist() == [True, False, True, True]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_stable_sort_of_integers(dtype: torch.dtype, descending: bool) -> None:
    x = torch.randint(0, 5, (3, 40)).to(dtype)
    if dtype == torch.int64:
        edge = [-(2**63), 2**63 - 1, 2**32, 2**32 + 1, -(2**32), 2**31, -(2**31) - 1, 0, -1]
        x[:, : len(edge)] = torch.tensor(edge)
    assert_same(A.sort.stable, x, stable=True, dim=-1, descending=descending)


def test_sort_of_unsigned_integers() -> None:
    for dtype, values in ((torch.uint32, [3, 2**31 + 1, 2**32 - 1, 0]), (torch.uint64, [3, 2**63 + 1, 2**40, 0])):
        assert_same(A.sort.stable, torch.tensor(values, dtype=dtype), stable=True)


def test_what_torch_leaves_open_is_declined_for_dtypes_full_of_ties() -> None:
    for x in (torch.randint(0, 5, (20,)), torch.rand(20).bfloat16(), torch.rand(20) > 0.5):
        like = list(x.sort(stable=True))
        with pytest.raises(NoLowering):
            lowered(A.sort.default, like, x)
        with pytest.raises(NoLowering):
            lowered(A.mode.default, [like[0][0], like[1][0]], x)
        with pytest.raises(NoLowering):
            lowered(A.topk.default, [like[0][:2], like[1][:2]], x, 2)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk(dtype: torch.dtype, largest: bool) -> None:
    x = torch.randperm(240).to(dtype).view(12, 20)
    for dim, k in ((0, 0), (0, 2), (1, 3), (1, 20)):
        assert_same(A.topk.default, x, k, dim, largest)
    x = torch.tensor([-NAN, 2, 1, -INF, INF, 4, -2, 7, 8, 9, 10, 11, 0], dtype=dtype)
    for k in (3, 13):
        assert_same(A.topk.default, x, k, 0, largest)
    assert_same(A.topk.default, torch.tensor(3.0), 1)


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (12, 1), (64, 1), (127, 2), (128, 2), (640, 10), (639, 10), (12, 6), (4, 4)]
)
def test_topk_without_order_is_lowered_where_aten_gives_one(n: int, k: int) -> None:
    x = torch.randperm(n).float()
    values, order = x.topk(k, sorted=False)
    if k == 1 or 64 * k <= n:
        assert_same(A.topk.default, x, k, -1, True, False)
        assert values.equal(values.sort(descending=True).values)
    else:
        with pytest.raises(NoLowering):
            lowered(A.topk.default, [values, order], x, k, -1, True, False)


def test_medians() -> None:
    for x in (ROWS, ROWS[:, 2:6], torch.full((2, 3), NAN), torch.randint(0, 4, (3, 9)), torch.randn(3, 8).bfloat16()):
        for op in (A.median, A.nanmedian):
            assert_same(op.default, x)
            assert_same(op.dim, x, 0)
            assert_same(op.dim, x, 1, True)


def test_kthvalue_and_mode() -> None:
    x = torch.randperm(60).float().view(5, 12)
    assert_same(A.kthvalue.default, x, 3, 0, True)
    assert_same(A.kthvalue.default, x, 12)
    for ties in (torch.randint(0, 3, (4, 16)), torch.randint(0, 2, (16, 3)).bool()):
        assert_same(A.mode.default, ties, 0)
        assert_same(A.mode.default, ties, -1, True)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_search(dtype: torch.dtype, right: bool) -> None:
    row = torch.tensor([1.0, 2, 2, 3, 5, NAN if dtype.is_floating_point else 9]).to(dtype)
    values = torch.tensor([[0.5, 1, 2, 2.5], [5, 6, INF, -INF]]).clamp(-9, 9).to(dtype)
    assert_same(A.searchsorted.Tensor, row, values, right=right)
    assert_same(A.searchsorted.Tensor, row.flip(0), values, side="right" if right else "left", out_int32=True)
    assert_same(A.searchsorted.Scalar, row, 2, right=right)
    assert_same(A.bucketize.Tensor, values, row, right=right, out_int32=True)
    assert_same(A.bucketize.Scalar, 2.5, row, right=right)


def test_search_in_rows_and_with_mixed_dtypes() -> None:
    rows = torch.rand(2, 3, 7).sort(-1)[0]
    assert_same(A.searchsorted.Tensor, rows, torch.rand(2, 3, 4))
    assert_same(A.searchsorted.Tensor, torch.tensor([1, 3, 5]), torch.tensor([0.5, 3.0, NAN]))
    assert_same(A.searchsorted.Scalar, torch.tensor([1, 3, 5]), 2.5)
    assert_same(A.searchsorted.Tensor, torch.empty(0), torch.rand(3))
    shuffled = torch.rand(9)
    assert_same(A.searchsorted.Tensor, shuffled, torch.rand(4), sorter=shuffled.argsort())


def test_a_sorter_out_of_range() -> None:
    row, values = torch.rand(3), torch.rand(2)
    assert_same_error(
        A.searchsorted.Tensor, torch.empty(2, dtype=torch.int64), row, values, sorter=torch.tensor([0, 1, 3])
    )


@pytest.mark.parametrize("size", [0, 3, 50])
def test_isin(size: int) -> None:
    tests = torch.arange(size) * 2.0
    x = torch.tensor([[0.0, -0.0, 1.0], [NAN, 4.0, 98.0]])
    for invert in (False, True):
        assert_same(A.isin.Tensor_Tensor, x, tests, invert=invert)
    assert_same(A.isin.Tensor_Tensor, torch.arange(5), tests + 0.5)
    assert_same(A.isin.Tensor_Scalar, x, 4)
    assert_same(A.isin.Scalar_Tensor, 4, tests)


def test_the_mode_of_floats_is_eagers() -> None:
    # With a NaN `std::sort` leaves no order at all.
    x = torch.tensor([1.0, NAN, 1, NAN, 2])
    with pytest.raises(NoLowering):
        lowered(A.mode.default, list(x.mode()), x)
