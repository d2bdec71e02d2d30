"""What all tests on the device share: the same call on the CPU and on the device, compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TPU = torch.device("tpu", 0)


def moved(value: Any, device: Any) -> Any:
    """Nested arguments with their tensors on another device, each a leaf that wants a gradient where it did."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device) for v in value)
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device(device)
    return value


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order; sparse ones as dense ones."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [t for x in tree for t in tensors(x)]
    if not isinstance(tree, torch.Tensor):
        return []
    return [tree if tree.layout is torch.strided else tree.to_dense()]


def same(want: Any, got: Any, tolerance: float = 1e-4) -> None:
    """Assert that what was made on the device is what was made on the CPU, down to strides of dense tensors' shapes."""
    assert len(tensors(want)) == len(tensors(got))
    for a, b in zip(tensors(want), tensors(got), strict=True):
        assert b.device.type == "tpu"
        assert (b.shape, b.dtype) == (a.shape, a.dtype)
        torch.testing.assert_close(b.cpu(), a.detach(), rtol=10 * tolerance, atol=tolerance, equal_nan=True)


def check(call: Callable[..., Any], *args: Any, tolerance: float = 1e-4, **kwargs: Any) -> Any:
    """Make a call on CPU tensors and on copies of them on the device, and compare. Returns what the device made."""
    want = call(*moved(args, "cpu"), **moved(kwargs, "cpu"))
    got = call(*moved(args, TPU), **moved(kwargs, TPU))
    same(want, got, tolerance)
    return got
