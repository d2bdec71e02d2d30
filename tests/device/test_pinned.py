"""Pinned memory: the host's, asked for in each of torch's ways, and known again."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from fused_eager import follower, fused_eager

from .compare import TPU

pytestmark = pytest.mark.skipif(not follower.has_hooks(), reason=f"torch asks Python ({follower.status()})")


def test_every_way_to_ask_for_it() -> None:
    plain = torch.ones(3)
    pinned = plain.pin_memory()
    assert pinned.tolist() == [1, 1, 1] and pinned.pin_memory() is pinned and not plain.is_pinned()
    made = [
        pinned,
        pinned[1:],
        torch.ones(3, pin_memory=True),
        torch.empty_like(plain, pin_memory=True),
        torch.tensor([1, 2], pin_memory=True),
        torch.full((2, 2), 3.0, pin_memory=True).t(),
    ]
    assert all(t.is_pinned() for t in made) and all(t.is_cpu for t in made)
    assert plain.untyped_storage().pin_memory().is_pinned()
    assert not torch.zeros(0, pin_memory=True).is_pinned()  # there is nothing to pin


def test_what_is_given_back_is_not_pinned_any_more() -> None:
    for size in (8, 10_000, 1 << 20):
        for _ in range(5):
            torch.empty(size, pin_memory=True)
        gc.collect()
        assert not any(t.is_pinned() for t in [torch.empty(size) for _ in range(20)])


def test_it_is_copied_from_and_to() -> None:
    x, pinned = torch.arange(6.0, device=TPU), torch.empty(6, pin_memory=True)
    pinned.copy_(x * 2, non_blocking=True)
    there = pinned.to(TPU, non_blocking=True)
    pinned.zero_()
    assert there.tolist() == [0, 2, 4, 6, 8, 10]
    assert pickle.loads(pickle.dumps(pinned)).tolist() == [0] * 6


def test_activations_that_are_kept_in_it() -> None:
    x = torch.ones(4, 4, device=TPU, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="tpu"):
        loss = (x @ x).relu().square().sum()
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [[64] * 4] * 4


def test_in_a_context() -> None:
    with fused_eager():
        x = torch.ones(3) + 1
        pinned, made = x.pin_memory(), torch.empty(3, pin_memory=True)
        made.copy_(x * 2)
        assert (pinned + made).tolist() == [6, 6, 6] and pinned.is_pinned() and made.is_pinned() and not x.is_pinned()


def test_a_tensor_of_the_device_cannot_be_pinned() -> None:
    assert not torch.ones(2, device=TPU).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device=TPU).pin_memory()
