"""What stands in for patched methods: known to whoever keeps functions, and out of the way of the program's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from fused_eager import fused_eager

NAMES = ("item", "__bool__", "tolist", "numpy", "__repr__", "data_ptr", "untyped_storage", "is_shared", "__deepcopy__")
METHODS = {name: getattr(torch.Tensor, name) for name in NAMES}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {name: vars(torch.Tensor).get(name) for name in NAMES}
    yield
    assert {name: vars(torch.Tensor).get(name) for name in NAMES} == before


class Own(torch.Tensor):
    """Answers by a table of functions, as torch's documentation shows it."""

    TABLE: ClassVar = {method: name for name, method in METHODS.items()}

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in cls.TABLE:
            return cls.TABLE[function]
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tables_of_functions_know_them() -> None:
    own = torch.ones(1).as_subclass(Own)
    with fused_eager():
        for name in NAMES:
            if name != "__bool__":  # Python makes a bool of whatever that returns
                assert getattr(own, name)(*[{}] * (name == "__deepcopy__")) == name
            assert getattr(torch.Tensor, name) == METHODS[name] and METHODS[name] in {getattr(torch.Tensor, name)}
        assert torch.Tensor.item != METHODS["tolist"] and torch.Tensor.tolist != METHODS["item"]


def test_tables_that_are_made_inside_hold_outside() -> None:
    with fused_eager():
        made = {getattr(torch.Tensor, name): name for name in NAMES}
    assert all(made[METHODS[name]] == name for name in NAMES)


def test_modes_for_functions_see_the_same_calls() -> None:
    seen: list[Any] = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch.overrides.resolve_name(function))
            return function(*args, **(kwargs or {}))

    def program() -> None:
        x = torch.ones(3)
        with Seeing():
            x.tolist(), x.numpy(), x.data_ptr(), x[0].item(), x.is_shared()

    program()
    expected = list(seen)
    seen.clear()
    with fused_eager():
        program()
    assert seen == expected


def test_they_are_pickled_and_copied_as_what_they_stand_for() -> None:
    one = torch.ones(1)
    with fused_eager():
        for name in ("item", "tolist"):
            for made in (pickle.loads(pickle.dumps(getattr(torch.Tensor, name))), copy.deepcopy(METHODS[name])):
                assert made(one) in (1.0, [1.0])
        assert copy.deepcopy({"read": torch.Tensor.item})["read"](one) == 1.0
        assert pickle.loads(pickle.dumps(torch.tensor))(2.0).item() == 2.0
        pickled = pickle.dumps([torch.Tensor.item, torch.Tensor.tolist, torch.as_tensor])
    assert pickle.loads(pickled) == [METHODS["item"], METHODS["tolist"], torch.as_tensor]


def forty_two(self: torch.Tensor) -> int:
    return 42


def test_what_the_program_takes_away_inside_stays_away() -> None:
    patch = mock.patch.object(torch.Tensor, "item", forty_two)
    patch.start()
    with fused_eager():
        patch.stop()
    assert torch.ones(1).item() == 1.0


def test_what_the_program_puts_there_inside_stays_there() -> None:
    with fused_eager():
        torch.Tensor.item = forty_two
    assert torch.ones(1).item() == 42
    del torch.Tensor.item
    with fused_eager():
        torch.Tensor.item = forty_two
        del torch.Tensor.item
    assert torch.ones(1).item() == 1.0


def test_what_the_program_puts_back_later_is_seen_through() -> None:
    patch = mock.patch.object(torch.Tensor, "item", forty_two)
    with fused_eager():
        patch.start()
    assert torch.ones(1).item() == 42
    patch.stop()  # puts back what stood there inside
    assert torch.ones(1).item() == 1.0
    with fused_eager():
        assert (torch.ones(1) * 3).item() == 3.0
    del torch.Tensor.item
