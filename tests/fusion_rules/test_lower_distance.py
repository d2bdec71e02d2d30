"""Distances between rows and their gradients against eager."""

from __future__ import annotations

import pytest
import torch

from .errors import assert_keeps_nan, assert_same
from .harness import sweep

A = torch.ops.aten
ORDERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 2.5, float("inf")]


def test_corpus() -> None:
    mode = sweep(["nn.functional.pdist", "nn.functional.pairwise_distance"], [torch.float32], limit=3)
    assert not mode.problems
    assert mode.checked


@pytest.mark.parametrize("p", ORDERS)
def test_all_pairs_of_two(p: float) -> None:
    x, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    assert_same(A._cdist_forward.default, x, y, p, None)
    # Equal rows: the subgradient is 0.
    y[0, 1] = x[0, 2]
    distance = A._cdist_forward(x, y, p, None)
    assert_same(A._cdist_backward.default, torch.randn_like(distance), x, y, p, distance)


@pytest.mark.parametrize("p", ORDERS)
def test_all_pairs_of_one(p: float) -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    distance = A._pdist_forward(x, p)
    assert_same(A._pdist_forward.default, x, p)
    assert_same(A._pdist_backward.default, torch.randn_like(distance), x, p, distance)


@pytest.mark.parametrize("shapes", [((4, 0), (2, 0)), ((0, 3), (2, 3)), ((4, 5), (0, 3, 5)), ((3, 1, 4, 2), (2, 5, 2))])
def test_empty_and_broadcast_batches(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y = (torch.randn(s) for s in shapes)
    assert_same(A._cdist_forward.default, x, y, 1.0, None)
    distance = A._cdist_forward(x, y, 1.0, None)
    if x.ndim == 2:
        assert_same(A._cdist_backward.default, torch.ones_like(distance), x, y, 1.0, distance)


@pytest.mark.parametrize("mode", [None, 0, 1, 2])
@pytest.mark.parametrize("rows", [4, 30])
def test_euclidean_by_product(rows: int, mode: int | None) -> None:
    x, y = torch.randn(rows, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    assert_same(A._cdist_forward.default, x, y, 2.0, mode)
    assert_same(A._euclidean_dist.default, x, y)


@pytest.mark.parametrize("n", [0, 1, 2, 60])
def test_numbers_of_pairs(n: int) -> None:
    assert_same(A._pdist_forward.default, torch.randn(n, 2), 1.0)


NAN, INF = float("nan"), float("inf")
# Equal rows, rows that are equal in a column, NaN and infinities.
CORNERS = torch.tensor([[1.0, 2], [1, 2], [1, 3], [0, -0.0], [NAN, 2], [INF, 2], [INF, -INF]], dtype=torch.float64)


@pytest.mark.parametrize("p", [*ORDERS, 0.9])
def test_corners(p: float) -> None:
    x, y = CORNERS, CORNERS[:4]
    # ATen's maximum drops a NaN or keeps it, by its place.
    same = assert_keeps_nan if p == INF else assert_same
    same(A._cdist_forward.default, x, y, p, None)
    same(A._pdist_forward.default, x, p)
    distance, pairs = A._cdist_forward(x, y, p, None), A._pdist_forward(x, p)
    assert_same(A._cdist_backward.default, torch.ones_like(distance), x, y, p, distance)
    assert_same(A._pdist_backward.default, torch.ones_like(pairs), x, p, pairs)


@pytest.mark.parametrize("p", ORDERS)
def test_equal_rows_have_no_gradient_in_a_program(p: float) -> None:
    from fused_eager import fused_eager

    def program() -> torch.Tensor:
        x = torch.tensor([[1.0, 2], [1, 2]], requires_grad=True)
        (grad,) = torch.autograd.grad(torch.cdist(x, torch.tensor([[1.0, 2], [1, 3]]), p=p).sum(), x)
        return grad

    want = program()
    with fused_eager(mode="strict", cache="off", progress=False):
        got = program()
    torch.testing.assert_close(got, want, equal_nan=True)
