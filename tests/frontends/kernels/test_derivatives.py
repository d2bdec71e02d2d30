"""Derivatives of jax_op: of first and second order, forward and backward, batched, and the user's own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree

from .functions import FUNCTIONS

Tensor = torch.Tensor


def _of_tensors(name: str) -> tuple[Any, list[Tensor]]:
    """An op as a function of its tensors alone, with a flat result, and the tensors."""
    op, arguments = FUNCTIONS[name]
    leaves, spec = _pytree.tree_flatten(arguments(torch.float64))
    tensors = [t.requires_grad_() for t in leaves if isinstance(t, Tensor)]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        at = iter(given)
        args = _pytree.tree_unflatten([next(at) if isinstance(x, Tensor) else x for x in leaves], spec)
        return tuple(_pytree.tree_leaves(op(*args)))

    return function, tensors


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_derivatives(name: str) -> None:
    function, tensors = _of_tensors(name)
    forward = name != "remembered"
    assert gradcheck(function, tensors, check_forward_ad=forward, check_batched_grad=True)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name: str) -> None:
    function, tensors = _of_tensors(name)
    assert gradgradcheck(function, tensors, check_fwd_over_rev=True, check_rev_over_rev=True)
