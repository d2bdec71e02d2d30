"""Losses over pairs against eager, by every reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .edges import assert_agrees, grid
from .errors import assert_same_error
from .harness import sweep

A = torch.ops.aten
LOSSES: dict[str, tuple[Any, ...]] = {"mse_loss": (), "smooth_l1_loss": (0.7,), "huber_loss": (0.7,),
                                      "soft_margin_loss": ()}


@pytest.mark.parametrize("name", [
    "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "l1_loss", "kl_div", "poisson_nll_loss",
])
def test_sweep(name: str) -> None:
    mode = sweep([f"nn.functional.{name}"], [torch.float32], limit=4)
    assert mode.checked and not mode.problems


def test_with_logits_cancels_in_half_precision_as_eager_does() -> None:
    mode = sweep(["nn.functional.binary_cross_entropy_with_logits"], [torch.bfloat16], limit=4)
    assert mode.checked and not mode.problems


def test_a_soft_margin_overflows_in_half_precision_as_eager_does() -> None:
    x, y, grad = torch.tensor([-12.0, 3.0]).half(), torch.ones(2).half(), torch.ones(2).half()
    assert A.soft_margin_loss(x, y, 0).isinf().any() and A.soft_margin_loss_backward(grad, x, y, 0).isnan().any()
    assert_agrees(A.soft_margin_loss.default, x, y, 0)
    assert_agrees(A.soft_margin_loss_backward.default, grad, x, y, 0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_values_and_derivatives(name: str, reduction: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40), torch.randn(40)
    grad = torch.tensor(1.5) if reduction else torch.randn(40)
    assert_agrees(getattr(A, name).default, x, y, reduction, *LOSSES[name])
    assert_agrees(getattr(A, f"{name}_backward").default, grad, x, y, reduction, *LOSSES[name])


@pytest.mark.parametrize("name", LOSSES)
def test_corners(name: str) -> None:
    x, y = grid(torch.float32, 2)
    assert_agrees(getattr(A, name).default, x, y, 0, *LOSSES[name], signs=False, atol=1e-37)
    assert_agrees(getattr(A, f"{name}_backward").default, torch.ones_like(x), x, y, 0, *LOSSES[name], signs=False,
                  atol=1e-37)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_binary_cross_entropy(reduction: int, weighted: bool) -> None:
    torch.manual_seed(0)
    p, t = torch.cat([torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.rand(40)]), torch.rand(44)
    t[:4] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    weight = torch.rand(44) if weighted else None
    grad = torch.tensor(1.5) if reduction else torch.randn(44)
    assert_agrees(A.binary_cross_entropy.default, p, t, weight, reduction, signs=False)
    assert_agrees(A.binary_cross_entropy_backward.default, grad, p, t, weight, reduction, signs=False)


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan")])
def test_probabilities_outside_are_eagers_error(bad: float) -> None:
    good, wrong, like = torch.tensor([0.5, 0.5]), torch.tensor([0.5, bad]), torch.tensor(0.0)
    assert_same_error(A.binary_cross_entropy.default, like, wrong, good)
    assert_same_error(A.binary_cross_entropy.default, like, good, wrong)


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_nothing(name: str) -> None:
    assert_agrees(getattr(A, name).default, torch.ones(0), torch.ones(0), 1, *LOSSES[name])
