"""Reads of single numbers in C++: the same numbers and errors, and each is noticed or counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from fused_eager import follower, fused_eager
from fused_eager.follower import build
from fused_eager.frontends.context import guards
from fused_eager.frontends.context.readers import NUMBERS, Reading
from fused_eager.frontends.context.threads import current_door
from tests.streams import forget_pending

pytestmark = pytest.mark.skipif(bool(build.obstacle()), reason=build.obstacle() or "it can be built")
FAR = 1e3  # seconds


@pytest.fixture
def context() -> Iterator[None]:
    forget_pending()
    with fused_eager(follower="compiled"):
        yield


@pytest.fixture
def noticed(context: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told of the reads of this thread."""
    seen: list[str] = []
    monkeypatch.setattr("fused_eager.frontends.context.bypass.read", lambda door: seen.append("read"))
    return seen


def test_they_are_made_in_cpp(context: None) -> None:
    assert all(type(vars(torch.Tensor)[name]).__name__ == "Reader" for name in NUMBERS)
    item = torch.Tensor.item
    assert item.__name__ == "item" and item.__wrapped__ is torch._C.TensorBase.item  # type: ignore[attr-defined]


def test_what_they_return_is_the_originals(noticed: list[str]) -> None:
    class Mine(torch.Tensor):
        pass

    x = torch.tensor(2) * 3
    assert (x.item(), int(x), float(x), bool(x), complex(x)) == (6, 6, 6.0, True, 6 + 0j)
    assert [10, 20, 30, 40, 50, 60, 70][x] == 70  # __index__
    assert torch.Tensor.item(x) == 6 and x.as_subclass(Mine).item() == 6
    assert len(noticed) >= 8


@pytest.mark.parametrize("wrong", [lambda x: x.item(1), lambda x: x.item(n=1), lambda x: torch.Tensor.item(), float])
def test_what_they_raise_is_the_originals(wrong: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as plain:
        wrong(x)
    with fused_eager(follower="compiled"), pytest.raises(plain.type) as here:
        wrong(x)
    assert str(here.value) == str(plain.value)


def test_they_are_counted_and_no_more_for_a_while(noticed: list[str]) -> None:
    x = torch.ones(())
    assert follower.overlook(time.perf_counter() + FAR) == 0.0
    try:
        for _ in range(5):
            x.item()
        assert noticed == [] and follower.overlooked() == 5 and follower.overlooked() == 0
        # Printing reads numbers of its own: they are none of the program's.
        door = current_door()
        assert door is not None
        door.bypassed = True
        try:
            repr(x)
        finally:
            door.bypassed = False
        assert follower.overlooked() == 0
        # Another thread has its own time.
        elsewhere: list[int] = []

        def read() -> None:
            x.item()
            elsewhere.append(follower.overlooked())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert elsewhere == [0]
    finally:
        assert follower.overlook(0.0) > time.perf_counter()
    x.item()
    assert noticed[-1] == "read"


def test_none_is_left_behind() -> None:
    before = {name: name in vars(torch.Tensor) for name in NUMBERS}
    with fused_eager(follower="compiled"):
        pass
    assert {name: name in vars(torch.Tensor) for name in NUMBERS} == before
    assert torch.Tensor.item is torch._C.TensorBase.item


def test_those_of_python_are_replaced_when_the_follower_is_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with fused_eager(follower="compiled"):
        pass
    taken = follower._STATE.module
    monkeypatch.setattr(follower._STATE, "module", None)
    monkeypatch.setattr(guards, "_made", {})
    with fused_eager(follower="python"):
        assert type(vars(torch.Tensor)["item"]) is Reading
        monkeypatch.setattr(follower._STATE, "module", taken)
        guards.renew()
        assert type(vars(torch.Tensor)["item"]).__name__ == "Reader"
        assert (torch.ones(()) * 3).item() == 3
    assert torch.Tensor.item is torch._C.TensorBase.item
