"""Ops that move elements, against eager; starts and indices of slices written back are inputs, not constants."""

from __future__ import annotations

import pytest
import torch
from fused_eager.fusion_rules.lowering import NoLowering
from fused_eager.fusion_rules.rule import hoisted_names

from .errors import assert_same, assert_same_error, lowered
from .harness import sweep

A = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)
NAMES = ["cat", "stack", "flip", "roll", "repeat", "tile", "tril", "triu", "diag_embed", "diagonal_copy",
         "diagonal_scatter", "slice_scatter", "select_scatter", "narrow_copy", "unfold_copy", "block_diag", "rot90",
         "split_with_sizes_copy", "unbind_copy", "expand_copy", "permute_copy", "transpose_copy", "squeeze_copy",
         "unsqueeze_copy", "t_copy", "view_copy", "alias_copy",
         "nn.functional.channel_shuffle"]


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float32], limit=2, backward=False)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("name", ["diagonal", "select", "slice", "unfold"])
def test_sweep_backward(name: str) -> None:
    mode = sweep([name], [torch.float32], limit=3)
    assert mode.checked and not mode.problems


def test_cat_promotes_and_skips_historical_empties() -> None:
    assert_same(A.cat.default, [torch.ones(2, 3), torch.zeros(0), torch.ones(1, 3, dtype=torch.int32)])
    assert_same(A.cat.default, [torch.ones(2, 0), torch.ones(2, 3).bfloat16()], -1)
    assert_same(A.cat.default, [torch.zeros(0), torch.zeros(0)])
    assert_same(A.stack.default, [torch.tensor(1), torch.tensor(2.5)])


@pytest.mark.parametrize("width", [1, 3, 200])
def test_two_halves_keep_every_bit(width: int) -> None:
    halves = [torch.full((2, width), v) for v in (-0.0, float("nan"))]
    got = lowered(A.cat.default, torch.empty(2, 2 * width), halves, 1)
    assert isinstance(got, list) and torch.equal(got[0].view(torch.int32), torch.cat(halves, 1).view(torch.int32))
    assert_same(A.cat.default, [torch.randn(3, width), torch.randn(3, width)], -1)


def test_roll_and_flip_and_repeat() -> None:
    assert_same(A.roll.default, X, [7])
    assert_same(A.roll.default, X, [-1, 8], [0, -1])
    assert_same(A.roll.default, X, [1, 1], [0, 0])
    assert_same(A.flip.default, X, [-1, 0])
    assert_same(A.repeat.default, X, [2, 1, 3])
    assert_same(A.repeat.default, X, [0, 1])
    assert_same(A.repeat.default, torch.tensor(3), [2, 2])


@pytest.mark.parametrize("diagonal", [-9, -1, 0, 2, 9])
def test_triangles_and_diagonals(diagonal: int) -> None:
    assert_same(A.tril.default, X, diagonal)
    assert_same(A.triu.default, X.expand(2, 4, 6) > 3, diagonal)
    assert_same(A.tril_indices.default, 4, 6, diagonal)
    assert_same(A.triu_indices.default, 4, 6, diagonal, dtype=torch.int32)
    assert_same(A.diag_embed.default, X, diagonal, 0, 1)
    assert_same(A.diag_embed.default, X, diagonal, 2, 0)


@pytest.mark.parametrize("offset", [-2, 0, 3])
@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (1, -1)])
def test_diagonal_written_back(offset: int, dims: tuple[int, int]) -> None:
    x = torch.randn(3, 4, 5)
    part = torch.randn_like(x.diagonal(offset, *dims))
    assert_same(A.diagonal_backward.default, part, [3, 4, 5], offset, *dims)
    assert_same(A.diagonal_scatter.default, x, part, offset, *dims)
    assert_same(A.diagonal_copy.default, x, offset, *dims)


@pytest.mark.parametrize(("start", "end", "step"), [
    (0, 6, 1), (2, 5, 1), (-3, 2**63 - 1, 1), (-99, 4, 1), (4, 99, 1), (1, 6, 2), (0, -1, 3), (5, 6, 4), (3, 3, 1),
    (9, 12, 1),
])
def test_slices_written_back(start: int, end: int, step: int) -> None:
    part = torch.randn_like(X[:, start:end:step])
    assert_same(A.slice_backward.default, part, [4, 6], 1, start, end, step)
    assert_same(A.slice_scatter.default, X, part, -1, start, end, step)
    assert_same(A.slice_copy.Tensor, X, 1, start, end, step)


@pytest.mark.parametrize("index", [0, 3, -1, -4])
def test_selections_written_back(index: int) -> None:
    assert_same(A.select_backward.default, torch.randn(6), [4, 6], 0, index)
    assert_same(A.select_scatter.default, X, torch.randn(6), 0, index)
    assert_same(A.select_copy.int, X, 0, index)


def test_where_a_slice_starts_is_an_input_of_the_region() -> None:
    assert hoisted_names(A.slice_backward.default) >= {"start", "end"}
    assert "index" in hoisted_names(A.select_backward.default)
    assert not hoisted_names(A.select_backward.default) & {"dim", "input_sizes"}


@pytest.mark.parametrize(("size", "step"), [(3, 1), (4, 2), (2, 2), (1, 3), (5, 3), (7, 7)])
def test_windows(size: int, step: int) -> None:
    x = torch.randn(2, 17, 3)
    assert_same(A.unfold_copy.default, x, 1, size, step)
    assert_same(A.unfold_backward.default, torch.randn_like(x.unfold(1, size, step)), [2, 17, 3], 1, size, step)


def test_windows_over_a_scalar() -> None:
    assert_same(A.unfold_copy.default, torch.tensor(2.0), 0, 1, 1)
    assert_same(A.unfold_backward.default, torch.ones(1), [], 0, 1, 1)


def test_bytes_seen_as_another_dtype() -> None:
    assert_same(A.view_copy.dtype, X, torch.int32)
    assert_same(A.view_copy.dtype, X, torch.int16)
    assert_same(A.view_copy.dtype, X.to(torch.int16), torch.float32)


def test_pieces() -> None:
    assert_same(A.split_copy.Tensor, X, 4, 1)
    assert_same(A.unsafe_split.Tensor, X, 3, 0)
    assert_same(A.unsafe_split_with_sizes.default, X, [1, 0, 3], 0)


def test_repeat_interleave_knows_its_length_or_declines() -> None:
    repeats = torch.tensor([2, 0, 3, 1])
    assert_same(A.repeat_interleave.Tensor, repeats, output_size=6)
    assert_same(A.repeat_interleave.Tensor, torch.tensor([0, 0, 2]), output_size=2)
    assert_same_error(A.repeat_interleave.Tensor, torch.empty(7).long(), repeats, output_size=7)
    with pytest.raises(NoLowering, match="depends on values"):
        lowered(A.repeat_interleave.Tensor, torch.empty(6).long(), repeats)


def test_what_reads_behind_its_argument_is_declined() -> None:
    with pytest.raises(NoLowering, match="storage"):
        lowered(A.as_strided_copy.default, X, X.t(), [4, 6], [6, 1])
    with pytest.raises(NoLowering, match="storage"):
        lowered(A.as_strided_scatter.default, X, X, X[:2], [2, 6], [6, 1])
