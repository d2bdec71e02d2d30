"""Embedding and class losses: values against eager, and eager's exceptions for classes that do not exist."""

from __future__ import annotations

import pytest
import torch

from .errors import assert_same, assert_same_error, lowered
from .harness import sweep

A = torch.ops.aten
MEANS = (0, 1, 2)
NAMES = ["nn.functional.embedding", "nn.functional.nll_loss", "nn.functional.cross_entropy",
         "nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss"]


@pytest.mark.parametrize("name", NAMES)
def test_sweep(name: str) -> None:
    mode = sweep([name], [torch.float32], limit=3)
    assert mode.checked and not mode.problems


@pytest.mark.parametrize("bad", [9, -1])
def test_embedding_out_of_range(bad: int) -> None:
    weight = torch.randn(5, 4)
    assert_same_error(A.embedding.default, torch.empty(2, 1, 4), weight, torch.tensor([[1], [bad]]))
    assert_same_error(A.embedding.default, torch.empty(4), weight, torch.tensor(bad, dtype=torch.int32))


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize(("by_frequency", "dtype"), [
    (False, torch.float32), (True, torch.float32), (False, torch.bfloat16),
])
def test_embedding_backward(padding: int, by_frequency: bool, dtype: torch.dtype) -> None:
    index = torch.randint(0, 5, (3, 7))
    grad = torch.randn(3, 7, 4).to(dtype)
    assert_same(A.embedding_dense_backward.default, grad, index, 6, padding, by_frequency)


def test_embedding_backward_leaves_out_a_padding_row_that_is_nan() -> None:
    grad = torch.tensor([[1.0], [float("nan")]])
    assert_same(A.embedding_dense_backward.default, grad, torch.tensor([0, 1]), 2, 1, False)


@pytest.mark.parametrize("reduction", MEANS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nll_loss(reduction: int, weighted: bool, dtype: torch.dtype) -> None:
    # Of one sign, as probabilities are: a sum of both may cancel down to what rounding has left.
    x, target = torch.log_softmax(torch.randn(6, 5), 1).to(dtype), torch.tensor([0, 4, 2, 2, -7, 1])
    x[4] = float("inf")
    weight = torch.rand(5).to(dtype) if weighted else None
    assert_same(A.nll_loss_forward.default, x, target, weight, reduction, -7)
    grad = torch.randn(6 if reduction == 0 else ()).to(dtype)
    total = torch.tensor(2.5, dtype=dtype)
    assert_same(A.nll_loss_backward.default, grad, x, target, weight, reduction, -7, total)


@pytest.mark.parametrize("reduction", MEANS)
def test_nll_loss_of_images_of_one_sample_and_of_nothing(reduction: int) -> None:
    weight = torch.rand(5)
    x, target = torch.randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4))
    assert_same(A.nll_loss2d_forward.default, x, target, weight, reduction, 1)
    grad = torch.randn((2, 3, 4) if reduction == 0 else ())
    assert_same(A.nll_loss2d_backward.default, grad, x, target, weight, reduction, 1, torch.tensor(3.0))
    assert_same(A.nll_loss_forward.default, x[0, :, 0, 0], torch.tensor(2), weight, reduction, -100)
    assert_same(A.nll_loss_backward.default, grad.sum(), x[0, :, 0, 0], torch.tensor(2), None, reduction, -100,
                torch.tensor(1.0))
    assert_same(A.nll_loss_forward.default, torch.randn(0, 5), torch.zeros(0).long(), None, reduction, -100)


@pytest.mark.parametrize("reduction", MEANS)
def test_nll_loss_with_every_target_ignored(reduction: int) -> None:
    x, target = torch.randn(2, 3), torch.tensor([9, 9])
    assert_same(A.nll_loss_forward.default, x, target, None, reduction, 9)
    grad = torch.ones(2 if reduction == 0 else ())
    assert_same(A.nll_loss_backward.default, grad, x, target, None, reduction, 9, torch.tensor(0.0))


@pytest.mark.parametrize("bad", [7, -1])
def test_nll_loss_out_of_range(bad: int) -> None:
    x, target, one = torch.randn(3, 5), torch.tensor([-100, bad, 2]), torch.tensor(1.0)
    assert_same_error(A.nll_loss_forward.default, [one, one], x, target, None, 1, -100)
    assert_same_error(A.nll_loss_backward.default, x, one, x, target, None, 1, -100, one)
    images, targets = x[:, :, None, None], target[:, None, None]
    assert_same_error(A.nll_loss2d_forward.default, [one, one], images, targets, None, 2, -100)
    assert_same_error(A.nll_loss2d_backward.default, images, one, images, targets, None, 2, -100, one)


@pytest.mark.parametrize("reduction", MEANS)
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin_loss(reduction: int, p: int) -> None:
    x, target, weight = torch.randn(4, 5), torch.tensor([0, 4, 2, 2]), torch.rand(5)
    assert_same(A.multi_margin_loss.default, x, target, p, 0.5, weight, reduction)
    grad = torch.randn(4 if reduction == 0 else ())
    assert_same(A.multi_margin_loss_backward.default, grad, x, target, p, 0.5, weight, reduction)


@pytest.mark.parametrize("reduction", MEANS)
def test_multilabel_margin_loss(reduction: int) -> None:
    x = torch.randn(3, 5)
    target = torch.tensor([[1, 1, -1, 2, 3], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0]])
    assert_same(A.multilabel_margin_loss_forward.default, x, target, reduction)
    is_target = A.multilabel_margin_loss_forward(x, target, reduction)[1]
    grad = torch.randn(3 if reduction == 0 else ())
    assert_same(A.multilabel_margin_loss_backward.default, grad, x, target, reduction, is_target)


@pytest.mark.parametrize("bad", [5, -2])
def test_margin_losses_out_of_range(bad: int) -> None:
    x, one = torch.randn(1, 5), torch.tensor(1.0)
    assert_same_error(A.multi_margin_loss.default, one, x, torch.tensor([bad]))
    assert_same_error(A.multi_margin_loss_backward.default, x, one, x, torch.tensor([bad]), 1, 1)
    labels = torch.tensor([[bad, 1, 1, 1, 1]])
    assert_same_error(A.multilabel_margin_loss_forward.default, [one, x], x, labels, 1)


def test_ignored_targets_are_not_checked() -> None:
    x = torch.randn(2, 5)
    got = lowered(A.nll_loss_forward.default, [torch.empty(()), torch.empty(())], x, torch.tensor([-100, 1]), None, 1,
                  -100)
    assert isinstance(got, list) and torch.equal(got[0], -x[1, 1])


@pytest.mark.parametrize("p", [1, 2])
def test_a_margin_that_is_no_number_counts_for_nothing(p: int) -> None:
    x = torch.tensor([[0.5, float("nan"), 0.7], [float("inf"), 0.2, 0.1]])
    target = torch.tensor([0, 1])
    assert_same(A.multi_margin_loss.default, x, target, p, 1, None, 0)
    assert_same(A.multi_margin_loss_backward.default, torch.ones(2), x, target, p, 1, None, 0)
