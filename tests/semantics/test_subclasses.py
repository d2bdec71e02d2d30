"""Subclasses of Tensor: made inside a context, copied, exchanged, and with a `__torch_dispatch__` of their own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from fused_eager import fused_eager

from .programs import check


def pending(n: int = 4) -> torch.Tensor:
    """0, 2, 4, ... computed in the mode."""
    return torch.arange(float(n)) * 2


class S(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    """Holds another tensor, of whatever layout."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, func(*inner[0], **inner[1]))


class BelowAllModes(torch.Tensor):
    """Runs each op on its own memory, below all modes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


class Redispatched(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {}))


class Inherited(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def made(kind: Any) -> Any:
    return torch.Tensor._make_subclass(kind, pending())


def plain(t: Any) -> torch.Tensor:
    return t.as_subclass(torch.Tensor)


def _swapped(first: Any, second: Any) -> Any:
    torch.utils.swap_tensors(first, second)
    return type(first).__name__, type(second).__name__, plain(first) + 1, plain(second) + 1


def _saved(t: Any) -> Any:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _loaded(swap: bool) -> Any:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        module.weight = torch.nn.Parameter(S(torch.ones(2, 3) * 2))
        other.weight = torch.nn.Parameter(torch.ones(2, 3) * 5)
        module.load_state_dict(other.state_dict())
        module.double()
        return type(module.weight).__name__, plain(module.weight.detach())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _trained() -> Any:
    module = torch.nn.Linear(3, 2)
    module.weight = torch.nn.Parameter(TwoTensor(torch.ones(2, 3) * 2, torch.ones(2, 3) * 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    return module.weight.a, module.weight.b


class HandsOn(torch.Tensor):
    """Its `__torch_function__` goes on to the function itself, past this class, once."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = torch.overrides.redispatch_function(func, types, args, kwargs)  # type: ignore[attr-defined]
        return tree_map_only(torch.Tensor, lambda t: t.as_subclass(cls) if type(t) is torch.Tensor else t, out)


class Asked(torch.Tensor):
    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


def _asked() -> Any:
    """Nodes of a backward pass call ops on what has such a function, which is asked of none of them."""
    Asked.names.clear()
    x = pending().as_subclass(Asked).requires_grad_()
    y = torch.cat([x * x.sin(), torch.stack([x, x * 2]).sum(0)])
    y.sum().backward()
    return list(Asked.names), plain(x.grad)


def _handed_on() -> Any:
    t = pending().as_subclass(HandsOn)
    copied, reduced = copy.deepcopy(t), copy.deepcopy(torch.nn.Parameter(t * 2))
    kinds = [type(x).__name__ for x in (copied, reduced, t + 1, _saved(t))]
    # Not its text: torch raises, and as long as that exception lives its transforms are switched off.
    return kinds, t.tolist(), t[1].item(), bool(t[1] > 1), plain(reduced.detach()), t.numpy().sum()


PROGRAMS: dict[str, Callable[[], Any]] = {
    **({"handed on": _handed_on} if hasattr(torch.overrides, "redispatch_function") else {}),  # not in torch 2.11
    "asked": _asked,
    "of lists": lambda: plain(S([[1, 2]]) * 2),
    "of nothing": lambda: (type(S()).__name__, S().shape, S(3).shape, S(2, 3).shape),
    "of a pending tensor": lambda: (type(S(pending())).__name__, plain(S(pending()) * 2)),
    "of pending numbers": lambda: plain(S([pending()[1], 3.0])),
    "of a storage": lambda: torch.Tensor(pending().untyped_storage()),
    "legacy": lambda: (torch.FloatTensor([1, 2]), torch.FloatTensor(pending()), torch.LongTensor(pending().long())),
    "legacy tensor": lambda: (torch.Tensor(3).shape, torch.Tensor([1, 2]), torch.Tensor([pending()[0], 2.0])),
    "new": lambda: (pending().new([1, 2]), pending().new(2, 3).shape, pending().new(pending())),
    "new of one": lambda: plain(S([1.0]).new([2])),
    "as_subclass": lambda: plain(pending().as_subclass(S) * 2),
    "make_subclass": lambda: plain(made(S) * 2),
    "parameter": lambda: plain(torch.nn.Parameter(S(pending())) * 2),
    "numbers of it": lambda: (S(pending())[1].item(), float(S(pending())[2]), S(pending()).tolist()),
    "saved": lambda: plain(_saved(S(pending()))),
    "copied": lambda: plain(copy.copy(S(pending()))),
    "deepcopy of a wrapper": lambda: copy.deepcopy(TwoTensor(pending(), pending() + 1)).b,
    "deepcopy of a parameter": lambda: copy.deepcopy(torch.nn.Parameter(TwoTensor(pending(), pending() + 1))).a,
    "deepcopy of a result": lambda: copy.deepcopy(Wrapper(pending()) + 1).inner,
    "deepcopy of a sparse one": lambda: copy.deepcopy(Wrapper(pending().to_sparse())).inner.to_dense(),
    "wrapper": lambda: ((TwoTensor(pending(), pending() + 1) * 2).b, repr(TwoTensor(pending(), pending() + 1) * 2)),
    "logging": lambda: ((LoggingTensor(pending()) + 1).elem, copy.deepcopy(LoggingTensor(pending())).elem),
    "below all modes": lambda: (plain(made(BelowAllModes) + 1), plain(copy.deepcopy(made(BelowAllModes)))),
    "redispatched": lambda: plain(made(Redispatched) + 1),
    "inherited": lambda: (plain(made(Inherited) + 1), plain(copy.deepcopy(made(Inherited)))),
    "swapped": lambda: (_swapped(pending(), pending() + 1), _swapped(S(pending()), pending() + 1)),
    "loaded": lambda: _loaded(False),
    "loaded by swapping": lambda: _loaded(True),
    "trained": lambda: _trained(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_subclass(name: str, mode: str) -> None:
    check(PROGRAMS[name], mode, versions=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["of nothing", "of lists", "of a pending tensor", "of pending numbers", "swapped"])
def test_subclass_with_the_follower_in_python(name: str) -> None:
    check(PROGRAMS[name], "fused", versions=False, follower="python")


class Counts(torch.Tensor):
    """Every call of torch's on one, an attribute's included, is noted and answered with a number."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", str(func)))
        return 7


def calls_of_set() -> list[str]:
    x = torch.zeros(3).as_subclass(Counts)
    float(pending().sum())
    Counts.calls.clear()
    x.set_()
    return list(Counts.calls)


@pytest.mark.parametrize(
    "options",
    [{"native": "measured", "compile": "auto"}, {"compile": "wait"}, {"mode": "strict"}, {"mode": "debug"}],
    ids=str,
)
def test_set_asks_no_function_of_a_subclass_more_than_in_eager(options: dict[str, Any]) -> None:
    """It may reach a mode without having asked; and the first op after a read is looked at before it runs."""
    expected = calls_of_set()
    with fused_eager(**options):
        assert calls_of_set() == expected
