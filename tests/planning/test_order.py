"""The canonical order: the order in which independent steps are written decides nothing, everything else does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_eager.cache import Key
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_eager import fused_eager
from fused_eager.compiling.canonical import to_parts
from tests.streams import events, recorded

Graph = list[tuple[str, tuple[int, ...]]]
UNARY = {"sin": torch.sin, "neg": torch.neg, "double": lambda x: x * 2.0, "t": lambda x: x.t()}
BINARY = {"add": torch.add, "sub": torch.sub, "mm": torch.mm}


@st.composite
def graphs(draw: Any) -> Graph:
    """Steps over two inputs, each with the steps (or inputs, 0 and 1) that it reads."""
    steps: Graph = []
    for i in range(draw(st.integers(2, 12))):
        name = draw(st.sampled_from([*UNARY, *BINARY]))
        reads = tuple(draw(st.integers(0, i + 1)) for _ in range(1 if name in UNARY else 2))
        steps.append((name, reads))
    return steps


def in_order(graph: Graph, order: list[int]) -> Callable[[], Any]:
    """A program that takes the steps in this order and keeps what no other step reads."""

    def program() -> Any:
        values: dict[int, torch.Tensor] = {0: torch.ones(3, 3), 1: torch.ones(3, 3)}
        for i in order:
            name, reads = graph[i]
            values[i + 2] = {**UNARY, **BINARY}[name](*[values[r] for r in reads])
        read = {r for _, reads in graph for r in reads}
        return [v for k, v in values.items() if k not in read and k > 1]

    return program


def another(graph: Graph, seed: int) -> list[int]:
    """A random order in which the steps can be taken."""
    rng = random.Random(seed)
    left, done, order = list(range(len(graph))), {0, 1}, []
    while left:
        i = rng.choice([i for i in left if set(graph[i][1]) <= done])
        left.remove(i)
        done.add(i + 2)
        order.append(i)
    return order


def digest(program: Callable[[], Any]) -> str:
    return Key(to_parts(recorded(program))).digest


@given(graphs(), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_order_of_independent_steps_is_not_in_the_key(graph: Graph, seed: int) -> None:
    assert digest(in_order(graph, list(range(len(graph))))) == digest(in_order(graph, another(graph, seed)))


@given(graphs(), st.data())
@settings(max_examples=60, deadline=None)
def test_another_computation_has_another_key(graph: Graph, data: Any) -> None:
    i = data.draw(st.integers(0, len(graph) - 1))
    name, reads = graph[i]
    family = UNARY if name in UNARY else BINARY
    other = data.draw(st.sampled_from(sorted(set(family) - {name})))
    changed = [*graph[:i], (other, reads), *graph[i + 1 :]]
    order = list(range(len(graph)))
    first, second = (recorded(in_order(g, order)) for g in (graph, changed))
    if str(first.nodes) == str(second.nodes):
        return  # `t` is a view, no step: two graphs may record the same
    assert Key(to_parts(first)).digest != Key(to_parts(second)).digest


def twins(swapped: bool) -> Callable[[], Any]:
    """Two chains that only their outputs tell apart."""

    def program() -> Any:
        a, b = torch.ones(4), torch.ones(4)
        if swapped:
            y = b.sin()
            x = a.sin()
            u = x.cos()
            v = y.cos()
        else:
            x = a.sin()
            u = x.cos()
            y = b.sin()
            v = y.cos()
        return u - y, v

    return program


def test_what_differs_far_away_is_told_apart() -> None:
    assert digest(twins(False)) == digest(twins(True))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_which_of_several_equal_branches_is_read_matters(n: int) -> None:
    def first(k: int) -> Callable[[], Any]:
        def program() -> Any:
            branches = [(torch.ones(4) * (i + 1.0)).sin() for i in range(n)]
            return branches[k].cos(), branches[0]

        return program

    assert digest(first(0)) != digest(first(1))
    assert digest(first(1)) == digest(first(n - 1))


def test_a_program_in_another_order_is_not_compiled_again() -> None:
    def step(swapped: bool, x: torch.Tensor) -> torch.Tensor:
        if swapped:
            b = x.exp() + 0.125
            a = x.tanh() * 3.5
        else:
            a = x.tanh() * 3.5
            b = x.exp() + 0.125
        return a - b

    x = torch.linspace(0, 1, 7)
    with fused_eager(mode="fused"):
        first = step(False, x).tolist()
        with events("compile") as seen:
            assert step(True, x).tolist() == first
    assert not seen


def test_a_failed_check_is_the_first_of_the_program() -> None:
    table = torch.ones(4, 2)

    def lookups() -> None:
        bad = [torch.nn.functional.embedding(torch.tensor([k]), table + 1.0) for k in (9, 8, 7)]
        torch.stack(bad).sum().item()

    with pytest.raises(IndexError, match=r"raised by aten.embedding"), fused_eager(mode="fused"):
        lookups()


def test_what_people_read_follows_the_program() -> None:
    def body() -> None:
        a = torch.ones(5).tanh()
        b = torch.ones(5).exp()
        c = torch.ones(5).neg()
        (a * b - c).tolist()

    with events("plan") as seen, fused_eager(mode="fused"):
        body()
    lines = [int(site.rpartition(":")[2]) for site, *_ in seen[-1].data["regions"][0]["lines"]]
    assert len(lines) > 3 and lines == sorted(lines)
