"""Keys: equal layers are one computation; whatever changes the code changes the key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from fused_eager.compiling.key import Computation, identity
from fused_eager.planning.plan import make_plan
from tests.streams import END, HOME, node, recorded


def key_of(
    program: Callable[[], Any],
    donate: bool = False,
    live: Callable[[Any], Any] = lambda out: out,
    flags: Hashable = True,
) -> Hashable:
    """The key of a program that is one region; `live` picks the results that are still seen after it."""
    found = identity(recorded(program, donate, live), flags)
    hash(found)
    return found


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An input: memory that is there already (its values do not matter)."""
    return torch.empty(shape or (8, 4), dtype=dtype)


def test_the_same_program_on_other_tensors_has_the_same_key() -> None:
    assert key_of(lambda: (x() * 2).relu()) == key_of(lambda: (x() * 2).relu())


def test_changing_numbers_do_not_change_the_key() -> None:
    assert key_of(lambda: x() * 2.0) == key_of(lambda: x() * 3.0) == key_of(lambda: x() * -0.0)


def test_equal_layers_have_equal_keys_wherever_they_stand() -> None:
    nodes = [node(3, [0, 1]), node(4, [3]), node(5, [4, 2]), node(6, [5])]
    homes = dict.fromkeys(range(7), HOME)
    plan = make_plan(nodes, frozenset([6]), frozenset([0]), homes, {}, 2, END)
    first, second = (identity(Computation(nodes, r, homes), True) for r in plan.regions)
    assert first == second


BASE: Callable[[], Any] = lambda: (x() * 2).relu() + 1  # noqa: E731
DIFFERENT: dict[str, Callable[[], Any]] = {
    "op": lambda: (x() * 2).sigmoid() + 1,
    "order": lambda: x().relu() * 2 + 1,
    "shape": lambda: (x(8, 5) * 2).relu() + 1,
    "dtype": lambda: (x(dtype=torch.float64) * 2).relu() + 1,
    "strides": lambda: (x(4, 8).t() * 2).relu() + 1,
    "kind of number": lambda: (x() * 2.0).relu() + 1,
    "a number instead of a tensor": lambda: (x() * x()).relu() + 1,
    "view": lambda: ((x(8, 8)[:, ::2]) * 2).relu() + 1,
    "in place": lambda: (x() * 2).relu_() + 1,
    "structure": lambda: (lambda y: y.relu() + y)(x() * 2),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_computation_has_another_key(name: str) -> None:
    assert key_of(DIFFERENT[name]) != key_of(BASE)


def test_which_operand_is_which_matters() -> None:
    def both(swap: bool) -> torch.Tensor:
        a, b = x(), x()
        y = a * 2 + b
        return y - (a if swap else b)

    assert key_of(lambda: both(True)) != key_of(lambda: both(False))


def test_one_tensor_twice_is_not_two_tensors() -> None:
    def twice() -> torch.Tensor:
        a = x()
        return a + a

    assert key_of(twice) != key_of(lambda: x() + x())


def test_liveness_is_part_of_the_key() -> None:
    def two() -> tuple[torch.Tensor, torch.Tensor]:
        y = x() * 2
        return y, y.relu()

    assert key_of(two) != key_of(two, live=lambda out: out[1])


def test_donation_is_part_of_the_key() -> None:
    assert key_of(BASE, donate=True) != key_of(BASE)


def test_options_that_change_the_code_are_part_of_the_key() -> None:
    assert key_of(BASE, flags=True) != key_of(BASE, flags=False)


def test_the_default_dtype_is_part_of_what_a_call_is() -> None:
    def halves() -> torch.Tensor:
        return torch.arange(8) / 2

    before = key_of(halves)
    torch.set_default_dtype(torch.float64)
    try:
        after = key_of(halves)
    finally:
        torch.set_default_dtype(torch.float32)
    assert before != after


def test_where_a_native_view_starts_is_an_address_not_part_of_the_key() -> None:
    big = torch.ones(100)
    keys = {key_of(lambda i=i: big[i : i + 4] * 2) for i in range(0, 40, 4)}
    assert len(keys) == 1
