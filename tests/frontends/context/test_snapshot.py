"""Snapshots: ops whose first kernel is ours reach modes and subclasses as they do without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from fused_eager import fused_eager

WAIT: dict[str, Any] = {"compile": "wait", "native": "never", "progress": False}
seen: list[str] = []


class Wrapped(torch.Tensor):
    """A subclass around a tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        out = func(*tree_map_only(Wrapped, lambda t: t.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, out)


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_subclass_sees_the_op_once() -> None:
    seen.clear()
    x = Wrapped(torch.tensor([2.0, 3.0])).requires_grad_()
    with fused_eager(**WAIT):
        y = x.prod()
        assert seen.count("aten.prod.default") == 1 and type(y) is Wrapped and y.inner.item() == 6
        y.backward()
    assert type(x.grad) is Wrapped and x.grad.inner.tolist() == [3.0, 2.0]


def test_and_where_no_mode_is_active() -> None:
    """The kernels are there for all threads, as long as any context is open."""
    seen.clear()
    x = Wrapped(torch.tensor([2.0, 3.0])).requires_grad_()
    with fused_eager(**WAIT), _disable_current_modes():
        y = x.prod(0)
        assert type(y) is Wrapped and y.inner.item() == 6 and y.requires_grad
    assert seen.count("aten.prod.dim_int") == 1


def test_a_mode_sees_marks_and_a_profiler_nothing_else() -> None:
    seen.clear()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with fused_eager(**WAIT), profile(activities=cpu) as profiler, Seeing(), record_function("a mark"):
        assert torch.tensor([2.0, 3.0]).prod().item() == 6
    assert seen.count("aten.prod.default") == 1
    names = [event.name for event in profiler.events()]
    assert names.count("aten::prod") == 2 and names.count("a mark") == 1  # the program's call, and its mode's
    assert not any("below_snapshot" in name for name in names)


def test_what_a_mode_raises_arrives() -> None:
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise KeyError(str(func))

    x = torch.tensor([2.0, 3.0])
    with fused_eager(**WAIT):
        with Refusing(), pytest.raises(KeyError, match=r"aten\.prod"):
            x.prod()
        with pytest.raises(IndexError, match="Dimension out of range"):
            x.prod(3)
        assert x.prod().item() == 6
