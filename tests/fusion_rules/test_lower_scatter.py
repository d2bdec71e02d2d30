"""gather and scatter: values against eager, and eager's exceptions for positions that do not exist."""

from __future__ import annotations

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering

from .errors import assert_same, assert_same_error, lowered
from .harness import sweep

A = torch.ops.aten
X = torch.arange(15.0).reshape(3, 5)
NAMES = ["gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce_sum", "scatter_reduce_amax"]


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float32], limit=2)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize(("dim", "bad"), [(0, -1), (1, 9)])
@pytest.mark.parametrize("shape", [(2, 4), (1, 5), (3, 1)])
def test_out_of_range(shape: tuple[int, int], dim: int, bad: int) -> None:
    index = torch.zeros(shape, dtype=torch.int64)
    index[-1, 0] = bad
    src = torch.ones(shape)
    assert_same_error(A.gather.default, src, X, dim, index)
    assert_same_error(A.scatter.src, X, X, dim, index, src)
    assert_same_error(A.scatter.value, X, X, dim, index, 2.0)
    assert_same_error(A.scatter_add.default, X, X, dim, index, src)
    assert_same_error(A.scatter_reduce.two, X, X, dim, index, src, "amax")


def test_scalars() -> None:
    assert_same(A.gather.default, torch.tensor(3.0), 0, torch.tensor(0))
    assert_same(A.scatter_add.default, torch.tensor(3.0), 0, torch.tensor([0]), torch.tensor([2.0]))
    assert_same_error(A.gather.default, torch.tensor(3.0), torch.tensor(3.0), 0, torch.tensor(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("columns", [1, 4])
def test_one_write_per_line_and_several(dtype: torch.dtype, columns: int) -> None:
    """One index per line is a select, several are a scatter."""
    x, index = torch.randn(6, 5).to(dtype), torch.randint(0, 5, (6, columns))
    assert_same(A.scatter_add.default, x, 1, index, torch.randn(6, columns).to(dtype))
    assert_same(A.scatter.value, x, 1, index, 2)
    assert_same(A.scatter.value, x, 1, index, True)
    if dtype != torch.complex64:
        assert_same(A.scatter.reduce, x, 1, index, torch.randn(6, columns).to(dtype), reduce="multiply")


def test_what_is_not_hit_keeps_its_sign_of_zero() -> None:
    x = torch.full((2, 3), -0.0)
    got = lowered(A.scatter_add.default, x, x, 1, torch.tensor([[0], [2]]), torch.ones(2, 1))
    assert isinstance(got, list) and torch.signbit(got[0]).tolist() == [[False, True, True], [True, True, False]]


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_scatter_reduce(reduce: str, include_self: bool, dtype: torch.dtype) -> None:
    x, index = (torch.randn(5, 4) * 4).to(dtype), torch.randint(0, 4, (5, 9)).clamp(max=2)
    assert_same(A.scatter_reduce.two, x, 1, index, (torch.randn(5, 9) * 4).to(dtype), reduce, include_self=include_self)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_means_of_complex_numbers_are_eagers(dtype: torch.dtype) -> None:
    x, index, values = torch.randn(9, 40, dtype=dtype), torch.randint(0, 9, (30, 40)), torch.randn(30, 40, dtype=dtype)
    got = lowered(A.scatter_reduce.two, x, x, 0, index, values, "mean")
    assert isinstance(got, list) and torch.equal(got[0], x.scatter_reduce(0, index, values, "mean"))


def test_scatter_add_sums_narrow_floats_in_float32_as_eager_does() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    got = lowered(A.scatter_add.default, x, x, 0, torch.zeros(500, dtype=torch.int64), torch.ones(500).bfloat16())
    assert isinstance(got, list) and got[0].tolist() == [500.0, 0.0]


def test_products_of_complex_numbers_are_eagers() -> None:
    x, y = torch.randn(9, 4, dtype=torch.complex64), torch.randn(9, 3, dtype=torch.complex64)
    once, often = torch.ones(9, 1).long(), torch.zeros(9, 3).long()
    want = x.scatter(1, once, y[:, :1], reduce="multiply")
    got = lowered(A.scatter.reduce, want, x, 1, once, y[:, :1], reduce="multiply")
    assert isinstance(got, list) and torch.equal(got[0], want)
    with pytest.raises(NoLowering, match="rounds products"):
        lowered(A.scatter.reduce, x, x, 1, often, y, reduce="multiply")
