"""Indexing by tensors: values against eager, and eager's exceptions for positions that do not exist."""

from __future__ import annotations

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering

from .errors import assert_same, assert_same_error, lowered
from .harness import sweep

A = torch.ops.aten
X = torch.arange(15.0).reshape(3, 5)
NAMES = ["index_select", "index_add", "index_copy", "index_fill", "index_put", "take", "put", "masked_fill",
         "masked_scatter", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"]


def at(*positions: int) -> torch.Tensor:
    return torch.tensor(positions)


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float32], limit=2)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_index_put_accumulates_every_duplicate(dtype: torch.dtype) -> None:
    x, index = torch.zeros(4, 3).to(dtype), torch.tensor([1, 1, -3, 0])
    assert_same(A.index_put.default, x, [index], torch.ones(4, 3).to(dtype), True)


def test_index_put_rounds_after_each_addition_as_eager_does() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    got = lowered(A.index_put.default, x, x, [torch.zeros(500, dtype=torch.int64)], torch.ones(500).bfloat16(), True)
    assert isinstance(got, list) and got[0].tolist() == [256.0, 0.0]


@pytest.mark.parametrize("indices", [
    [at(2, 0)], [None, at(-1, 3)], [at(0, 1), at(1, -2)], [at(0), None, at(1, 2)], [None, at(1), at(2, 0)],
    [torch.tensor(1), None, at(0)], [None, None, torch.tensor([[0, 1], [2, 3]])], [at(), None],
], ids=str)
def test_index_places_its_dimensions_as_eager_does(indices: list[torch.Tensor | None]) -> None:
    x = torch.randn(3, 4, 5)
    indices = [i if i is None or i.numel() else i.long() for i in indices]
    assert_same(A.index.Tensor, x, indices)
    assert_same(A.index_put.default, x, indices, torch.randn_like(A.index.Tensor(x, indices)), True)


@pytest.mark.parametrize(("indices", "values"), [
    ([at(9)], ()), ([None, at(0, -7)], ()), ([at(0, 1), at(1, 5)], ()), ([at(0, 1).int(), at(1, -6).int()], ()),
])
def test_index_out_of_range(indices: list[torch.Tensor | None], values: tuple[int, ...]) -> None:
    like = A.index.Tensor(X, [None if i is None else i * 0 for i in indices])
    assert_same_error(A.index.Tensor, like, X, indices)
    assert_same_error(A.index_put.default, X, X, indices, torch.ones(values))
    assert_same_error(A._index_put_impl.default, X, X, indices, torch.ones(values), True)


def test_masks_that_select_an_unknown_number_are_declined() -> None:
    with pytest.raises(NoLowering, match="depends on values"):
        lowered(A.index.Tensor, X, X, [X > 3])
    with pytest.raises(NoLowering, match="depends on values"):
        lowered(A.index_put.default, X, X, [at(0, 1, 2) > 0, at(0, 1)], torch.ones(2))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("mask", "values"), [
    ([X > 3], (11,)), ([X > 3], ()), ([X > 99], ()), ([X > 99], (0,)), ([X[:, 0] > 3], (2, 5)), ([X[:, 0] > 3], (5,)),
    ([None, X[0] > 2], (3, 2)), ([None, X[0] > 2], (3, 1)),
], ids=lambda v: str(v) if isinstance(v, tuple) else "")
def test_index_put_through_a_mask(
    mask: list[torch.Tensor | None], values: tuple[int, ...], accumulate: bool
) -> None:
    assert_same(A.index_put.default, X, mask, torch.randn(values), accumulate)


def test_index_put_through_a_mask_with_too_many_values() -> None:
    assert_same_error(A.index_put.default, X, X, [X[:, 0] > 3], torch.ones(3, 5))
    assert_same_error(A.index_put.default, X, X, [X > 3], torch.ones(3))
    assert_same_error(A.index_put.default, X, X, [None, X[0] > 2], torch.ones(3, 4))


@pytest.mark.parametrize(("dim", "bad"), [(0, 9), (1, -7), (2, 9)])
def test_index_family_out_of_range(dim: int, bad: int) -> None:
    x, index = torch.zeros(3, 4, 2), at(1, bad)
    like = x.index_select(dim, at(0, 0))
    assert_same_error(A.index_select.default, like, x, dim, index)
    assert_same_error(A.index_add.default, x, x, dim, index, like)
    assert_same_error(A.index_add.default, x, x, dim, index.int(), like)
    assert_same_error(A.index_add.default, x, x, dim, index, like, alpha=2)
    assert_same_error(A.index_copy.default, x, x, dim, index, like)
    assert_same_error(A.index_fill.int_Scalar, x, x, dim, index, 1.0)
    assert_same_error(A.index_reduce.default, x, x, dim, index, like, "amax")


def test_one_dimension_out_of_range() -> None:
    x, index, like = torch.zeros(3), at(1, -9), torch.zeros(2)
    assert_same_error(A.index_select.default, like, x, 0, index)
    assert_same_error(A.index_add.default, x, x, 0, index, like)
    assert_same_error(A.index_copy.default, x, x, 0, index, like)
    assert_same_error(A.index_fill.int_Scalar, x, x, 0, index, 1.0)
    assert_same_error(A.index_reduce.default, x, x, 0, index, like, "prod")
    assert_same_error(A.take.default, like, x, index)
    assert_same_error(A.put.default, x, x, index, like)


def test_positions_from_the_end() -> None:
    assert_same(A.take.default, X, at(-1, 3, -15))
    assert_same(A.put.default, X, at(-1, 3, -1), torch.ones(3), True)
    assert_same(A.index_fill.int_Scalar, X, 1, at(-1, 0), 7)
    # What eager refuses is refused: these do not count from the end.
    assert_same_error(A.index_select.default, X[:1], X, 0, at(-1))
    assert_same_error(A.index_copy.default, X, X, 0, at(-1), X[:1])


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_index_reduce(reduce: str, include_self: bool) -> None:
    for x in (torch.randn(4, 3), torch.randint(-9, 9, (4, 3))):
        source = (x.flip(0) * 2)[[0, 1, 2, 3, 0]]
        assert_same(A.index_reduce.default, x, 0, at(0, 2, 2, 2, 0), source, reduce, include_self=include_self)


def test_index_reduce_propagates_nan() -> None:
    x, source = torch.zeros(2), torch.tensor([float("nan"), 1.0])
    assert_same(A.index_reduce.default, x, 0, at(0, 0), source, "amax")
    assert_same(A.index_reduce.default, x, 0, at(0, 0), source.flip(0), "amin")


@pytest.mark.parametrize(("dtype", "value"), [
    (torch.float32, 1e39), (torch.bfloat16, -3.4028e38), (torch.float16, 65536), (torch.uint8, 300),
    (torch.uint8, -256), (torch.uint8, -1.0), (torch.int64, float("nan")), (torch.int8, 128.0),
    (torch.complex64, 1e300),
])
def test_numbers_that_do_not_fit(dtype: torch.dtype, value: float) -> None:
    x, mask = torch.zeros(2, dtype=dtype), torch.tensor([True, False])
    assert_same_error(A.masked_fill.Scalar, x, x, mask, value)
    assert_same_error(A.index_fill.int_Scalar, x, x, 0, at(0), value)


@pytest.mark.parametrize(("dtype", "value"), [
    (torch.float32, float("-inf")), (torch.bfloat16, float("nan")), (torch.float16, 65504.0), (torch.uint8, -1),
    (torch.int32, 2.9), (torch.int32, -2.9), (torch.bool, 0.5), (torch.float64, -0.0),
])
def test_numbers_that_fit_are_converted_as_in_eager(dtype: torch.dtype, value: float) -> None:
    assert_same(A.masked_fill.Scalar, torch.ones(2, 2).to(dtype), torch.tensor([True, False]), value)


def test_masked_scatter_over_many_elements() -> None:
    mask = torch.rand(3, 7001) > 0.5
    assert_same(A.masked_scatter.default, torch.zeros(3, 7001), mask, torch.randn(30000))
    grad = torch.randn(3, 7001)
    assert_same(A.masked_scatter_backward.default, grad, mask, [30000])


def test_masked_scatter_backward_of_one_element() -> None:
    for hit in (True, False):
        assert_same(A.masked_scatter_backward.default, torch.tensor([3.0]), torch.tensor([hit]), [2])


def test_masked_scatter_with_too_few_values() -> None:
    assert_same_error(A.masked_scatter.default, X, X, X > 3, torch.ones(10))
    assert_same_error(A.masked_scatter.default, X, X, X > 3, torch.ones(0))
    assert_same(A.masked_scatter.default, X, X > 3, torch.ones(11))
