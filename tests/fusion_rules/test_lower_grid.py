"""Sampling at positions that are values, with their gradients, against ATen."""

from __future__ import annotations

import itertools

import pytest
import torch

from .errors import assert_same, lowered

A = torch.ops.aten
BILINEAR, NEAREST, BICUBIC = 0, 1, 2


def positions(*shape: int) -> torch.Tensor:
    """Mostly inside, some far outside, some on the edges."""
    grid = torch.rand(*shape, dtype=torch.float64) * 3 - 1.5
    grid.view(-1)[::7] = 1.0
    grid.view(-1)[3::11] = -1.0
    grid.view(-1)[5::13] *= 9
    return grid


@pytest.mark.thinned(6)
@pytest.mark.parametrize("mode", [BILINEAR, NEAREST, BICUBIC])
@pytest.mark.parametrize(("padding", "align"), list(itertools.product(range(3), [False, True])))
def test_two_dimensions(mode: int, padding: int, align: bool) -> None:
    x, grid = torch.randn(2, 3, 5, 6, dtype=torch.float64), positions(2, 4, 3, 2)
    how = (mode, padding, align)
    assert_same(A.grid_sampler_2d.default, x, grid, *how)
    g = torch.randn(2, 3, 4, 3, dtype=torch.float64)
    if padding == 0 or mode != BICUBIC:
        assert_same(A.grid_sampler_2d_backward.default, g, x, grid, *how, [True, True])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", [BILINEAR, NEAREST])
@pytest.mark.parametrize("padding", range(3))
def test_three_dimensions(mode: int, padding: int) -> None:
    x, grid = torch.randn(2, 2, 3, 4, 5, dtype=torch.float64), positions(2, 2, 3, 2, 3)
    assert_same(A.grid_sampler_3d.default, x, grid, mode, padding, False)
    g = torch.randn(2, 2, 2, 3, 2, dtype=torch.float64)
    assert_same(A.grid_sampler_3d_backward.default, g, x, grid, mode, padding, False, [True, True])


def test_the_image_may_need_no_gradient() -> None:
    x, grid, g = torch.randn(1, 2, 4, 4), torch.rand(1, 3, 3, 2), torch.randn(1, 2, 3, 3)
    want = A.grid_sampler_2d_backward(g, x, grid, 0, 0, False, [False, True])[1]
    got = lowered(A.grid_sampler_2d_backward.default, want, g, x, grid, 0, 0, False, [False, True])
    torch.testing.assert_close(got[0], want)


def test_one_pixel_reflects_onto_itself() -> None:
    assert_same(A.grid_sampler_2d.default, torch.randn(1, 1, 1, 1), positions(1, 3, 3, 2).float(), 0, 2, True)


@pytest.mark.parametrize("size", [[2, 3, 4, 5], [1, 1, 1, 3], [2, 1, 3, 2, 4]], ids=str)
@pytest.mark.parametrize("align", [False, True])
def test_affine_grid(size: list[int], align: bool) -> None:
    rank = len(size) - 2
    theta = torch.randn(size[0], rank, rank + 1, dtype=torch.float64)
    assert_same(A.affine_grid_generator.default, theta, size, align)


def _nowhere(rank: int) -> torch.Tensor:
    """Positions of which one coordinate is no number."""
    grid = torch.zeros(1, 7, *[1] * (rank - 1), rank)
    grid.view(7, rank)[:, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e20, -1e20, 5.0, 0.3])
    return torch.cat([grid, grid.roll(1, -1)], 1)


@pytest.mark.parametrize("mode", [BILINEAR, NEAREST])
@pytest.mark.parametrize("padding", range(3))
def test_positions_that_are_no_numbers(mode: int, padding: int) -> None:
    for rank, op in ((2, A.grid_sampler_2d), (3, A.grid_sampler_3d)):
        x, grid = torch.randn(1, 2, *[3] * rank), _nowhere(rank)
        assert_same(op.default, x, grid, mode, padding, False)
        # ATen's own gradients for images read wherever a NaN points to.
        if rank == 3:
            g = torch.ones_like(op(x, grid, mode, padding, False))
            g.view(-1)[::3] = float("inf")
            assert_same(A.grid_sampler_3d_backward.default, g, x, grid, mode, padding, False, [True, True])


@pytest.mark.parametrize("mode", [BILINEAR, NEAREST])
@pytest.mark.parametrize("padding", range(3))
def test_a_nan_in_bfloat16_is_at_the_first_voxel(mode: int, padding: int) -> None:
    x = torch.arange(54, dtype=torch.bfloat16).reshape(1, 2, 3, 3, 3)
    grid = torch.zeros(1, 4, 1, 1, 3, dtype=torch.bfloat16)
    grid.view(4, 3)[:3, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert_same(A.grid_sampler_3d.default, x, grid, mode, padding, False)
    g = torch.ones(1, 2, 4, 1, 1, dtype=torch.bfloat16)
    assert_same(A.grid_sampler_3d_backward.default, g, x, grid, mode, padding, False, [True, True])


def test_positions_that_are_no_numbers_between_pixels() -> None:
    x, grid = torch.randn(1, 2, 3, 3), _nowhere(2)
    assert_same(A.grid_sampler_2d.default, x, grid, BICUBIC, 0, False)
    for mode in (BILINEAR, NEAREST, BICUBIC):
        g = torch.ones(1, 2, 14, 1)
        assert_same(A.grid_sampler_2d_backward.default, g, x, grid, mode, 0, False, [True, True])
