"""Calls of the outermost module: each is told, nothing is left behind, and nothing of it is copied or saved."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules

from fused_eager import outermost
from fused_eager.outermost import Calls


class Inner(torch.nn.Module):
    def forward(self, x: int) -> int:
        return x + 1


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: int, *, times: int = 1) -> int:
        return int(self.inner(x)) * times


class WithACallOfItsOwn(Outer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return -super().__call__(*args, **kwargs)


class Callable:
    def __call__(self, x: int) -> int:
        return x


class WithACallThatIsNoFunction(Outer):
    __call__ = Callable()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for kind in (Inner, Outer, torch.nn.Module):
        assert vars(kind).get("__call__") is (torch.nn.Module.__call__ if kind is torch.nn.Module else None)
    assert not outermost._LISTENING and not modules._global_forward_pre_hooks


class Told:
    """Counts what it is told, and wants so much."""

    def __init__(self, most: int = 1000):
        self.count, self.most = 0, most

    def __call__(self) -> bool:
        self.count += 1
        return self.count < self.most


def test_calls_of_the_outermost_module_are_told_and_of_no_other() -> None:
    told, model = Told(), Outer()
    calls = Calls(told)
    for n in range(1, 4):
        assert model(1, times=3) == 6
        assert told.count == n
    assert not modules._global_forward_pre_hooks, "no module inside pays for it"
    Outer()(1)
    model.inner(1)
    assert told.count == 3
    calls.forget()
    model(1)
    assert told.count == 3


def test_it_ends_when_nobody_wants_more() -> None:
    told, model = Told(2), Outer()
    Calls(told)
    for _ in range(5):
        model(1)
    assert told.count == 2


def test_a_class_with_a_call_of_its_own() -> None:
    told, model, own = Told(), WithACallOfItsOwn(), vars(WithACallOfItsOwn)["__call__"]
    calls = Calls(told)
    assert [model(1), model(2)] == [-2, -3] and told.count == 2
    assert model.__call__.__doc__ == own.__doc__
    calls.forget()
    assert vars(WithACallOfItsOwn)["__call__"] is own


def test_a_call_that_is_no_function_is_left_alone() -> None:
    calls, model = Calls(told := Told()), WithACallThatIsNoFunction()
    assert [model(5), model(6)] == [5, 6] and not told.count, "torch's hooks do not see it"
    torch.nn.Module.__call__(model, 1)
    torch.nn.Module.__call__(model, 1)
    assert told.count == 2
    calls.forget()


def test_copies_and_files_hold_nothing_of_it() -> None:
    told, model = Told(), Outer()
    calls = Calls(told)
    model(1)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"fused_eager" not in file.getvalue()
    twin = copy.deepcopy(model)
    assert twin(1) == 2 and told.count == 1, "a copy is another module"
    calls.forget()


def test_what_somebody_else_puts_in_its_place_stays() -> None:
    told, model = Told(), Outer()
    calls = Calls(told)
    model(1)
    before = Outer.__call__

    def doubled(self: Outer, *args: Any) -> Any:
        return 2 * before(self, *args)

    Outer.__call__ = doubled  # type: ignore[method-assign]
    try:
        assert model(1) == 4 and told.count == 2
        calls.forget()
        assert Outer.__call__ is doubled and model(1) == 4 and told.count == 2
    finally:
        del Outer.__call__


def test_tracers_that_replace_the_call_of_all_modules_are_obeyed() -> None:
    calls, model = Calls(Told()), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Tanh()))
    x = torch.randn(3)
    model(x)
    traced = torch.fx.symbolic_trace(model)
    assert [n.op for n in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert torch.equal(traced(x), model(x))
    calls.forget()


def test_two_listeners_and_a_derived_class() -> None:
    first, second = Told(), Told(1)
    base, derived = Outer(), WithACallOfItsOwn()
    calls = Calls(first)
    base(1)
    Calls(second)
    derived(1)
    assert (first.count, second.count) == (1, 1)
    base(1)
    calls.forget()
    assert (first.count, second.count) == (2, 1)


def test_when_the_module_is_gone_the_next_one_is_told_of() -> None:
    told, model = Told(), Outer()
    calls = Calls(told)
    model(1)
    del model
    gc.collect()
    other = Outer()
    other(1)
    other(1)
    assert told.count == 3
    calls.forget()


def test_calls_of_other_threads_are_not_told() -> None:
    told, model = Told(), Outer()
    calls = Calls(told)

    def elsewhere() -> None:
        thread = threading.Thread(target=model, args=(1,))
        thread.start()
        thread.join()

    elsewhere()
    assert not told.count
    model(1)
    elsewhere()
    assert told.count == 1
    calls.forget()
