"""Ordinary tensors in inference mode: what views them is known as a view, and what writes them is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_eager import fused_eager

from .programs import MODES, check

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda a: a.view(6),
    "select": lambda a: a[0],
    "positive": lambda a: +a,
    "view_as": lambda a: a.view_as(a),
    "expand_as": lambda a: a.expand_as(a),
    "reshape": lambda a: a.reshape(6),
    "flatten": lambda a: a.flatten(),
    "ravel": lambda a: a.ravel(),
    "unflatten": lambda a: a.unflatten(2, (1, 3)),
    "mT": lambda a: a.mT,
    "swapaxes": lambda a: a.swapaxes(0, 1),
    "movedim": lambda a: a.movedim(0, 2),
    "narrow": lambda a: a.narrow(2, 0, 2),
    "chunk": lambda a: a.chunk(2, 2)[0],
    "split": lambda a: a.split([1, 2], 2)[1],
    "tensor_split": lambda a: a.tensor_split(3, 2)[0],
    "contiguous": lambda a: a.contiguous(),
    "to": lambda a: a.to(torch.float32),
    "real": lambda a: a.real,
}
WRITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul_": lambda a: a.mul_(2),
    "multiply_": lambda a: a.multiply_(2),
    "divide_": lambda a: a.divide_(2),
    "square_": lambda a: a.square_(),
    "clip_": lambda a: a.clip_(0, 1),
    "index_add_": lambda a: a.index_add_(2, torch.tensor([0]), torch.ones(1, 2, 1)),
    "swapaxes_": lambda a: a.swapaxes_(0, 2),
}


def _attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)[:60]
    return "done"


def _viewed(requires_grad: bool) -> list[Any]:
    """Each view, made in inference mode and written outside."""
    out = []
    for view in VIEWS.values():
        a = torch.ones(1, 2, 3, requires_grad=requires_grad).clone()
        with torch.inference_mode():
            v = view(a)
        known = v._is_view(), v.requires_grad, v.is_inference()
        out += [known, _attempt(lambda v=v: v.add_(2)), a._version, v]
    return out


def _written() -> list[Any]:
    """Each write, in inference mode, of what a backward pass needs."""
    out = []
    for write in WRITES.values():
        a = torch.ones(1, 2, 3, requires_grad=True)
        b = a.exp()
        with torch.inference_mode():
            write(b)
        out += [b._version, _attempt(lambda b=b: b.sum().backward())]
    return out


@pytest.mark.parametrize("program", [lambda: _viewed(True), lambda: _viewed(False), _written], ids=["graph", "no", "w"])
@pytest.mark.parametrize("mode", MODES)
def test_views_and_writes_are_tracked_as_in_eager(mode: str, program: Callable[[], Any]) -> None:
    check(program, mode)


@pytest.mark.parametrize("options", [{}, {"mode": "off"}, {"compile": "wait"}], ids=str)
def test_they_are_when_they_come_again(options: dict[str, Any]) -> None:
    expected = [str(x) for x in _viewed(True) + _written()]
    with fused_eager(**options):
        for _ in range(3):
            assert [str(x) for x in _viewed(True) + _written()] == expected
