"""Lengths that keep changing: one executable for all of them where rows do not depend on each other, else none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused_eager import fused_eager, sync
from fused_eager.compiling.template import _is_same
from fused_eager.executing import load
from fused_eager.log.events import Event
from tests.streams import all_lengths_large, events

Tensor = torch.Tensor
Inputs = tuple[Tensor, ...]
MANY = 6  # lengths, of which the first is compiled as it is, and the second makes the template


@pytest.fixture(autouse=True)
def all_sizes() -> Iterator[None]:
    with all_lengths_large():
        yield


def vector(n: int) -> Inputs:
    return torch.randn(4 * n), torch.randn(4 * n)


def rows(n: int) -> Inputs:
    return torch.randn(n, 8), torch.randn(n, 8)


def batch(n: int) -> Inputs:
    """The number of rows is the product of two lengths, of which both change."""
    return torch.randn(3 + n % 4, n, 8), torch.randn(3 + n % 4, n, 8)


def image(n: int) -> Inputs:
    return torch.rand(n, n + 5, 3), torch.rand(n, n + 5)


def run(program: Callable[..., Any], inputs: Callable[[int], Inputs], count: int = MANY) -> tuple[list[Event], str]:
    """Run a program for lengths that keep changing and compare it with eager. Returns what was compiled for the last
    ones, and why they were not run block by block ("" if they were)."""
    weight = torch.linspace(0.5, 2.0, 8)
    late: list[Event] = []
    with events("lengths", "compile") as seen:
        for i in range(count):
            given = inputs(40 + 7 * i)
            wanted = program(*[t.clone() for t in given], weight)
            if i == 2:
                late = seen[:]
            with fused_eager():
                got = program(*given, weight)
                sync()
            assert got.stride() == wanted.stride()
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    found = [e for e in seen if e.kind == "lengths"]
    assert len(found) == 1, "it is found out once"
    return [e for e in seen[len(late) :] if e.kind == "compile"], found[0].data["why"]


def chain(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return torch.log((a.sin() * b).abs() + 1.5) - torch.where(a > 0, a, b)


def norm(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(a, (8,), w)) + b


def soft(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(a * 2, -1) * b + a.mean(-1, keepdim=True)


def grey(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    lit = (a - torch.tensor([0.1, 0.2, 0.3])) * w[:3]
    return (lit[..., 0] * 0.3 + lit[..., 1] * 0.6 + b).clamp(0, 1)


def heads(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (a * w).view(*a.shape[:-1], 2, 4).transpose(-1, -2).sum(-1).exp() * 0.5


def halves(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (F.silu(a.bfloat16()) * b.bfloat16()).float()


def joined(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return torch.cat([a, b], -1).relu() * 2


def in_place(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    a.mul_(2).add_(b)
    return a


def by_length(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return a * a.shape[0] + b


BY_ROWS = [
    (chain, vector), (chain, rows), (chain, batch), (norm, rows), (norm, batch), (soft, batch), (grey, image),
    (heads, batch), (halves, rows), (joined, rows), (in_place, rows), (by_length, rows),
]  # fmt: skip


@pytest.mark.parametrize(("program", "inputs"), BY_ROWS)
def test_one_executable_is_for_all_lengths(program: Callable[..., Any], inputs: Callable[[int], Inputs]) -> None:
    compiled, why = run(program, inputs)
    assert not why and not compiled


def standard(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (a - a.mean()) / a.std() + b * 2


def loss(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return ((a * w - b) ** 2).mean()


def running(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return torch.cumsum(a, 0).sin() + b * 2


def counted(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return a * torch.arange(a.shape[0], dtype=torch.float32).unsqueeze(-1) + b


def perceptron(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(a + b, w.outer(w))) * 2


def attention(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    scores = torch.softmax(a @ a.transpose(-1, -2), -1)
    return F.layer_norm(scores @ b + a, (8,), w) * 2


@pytest.mark.parametrize(
    ("program", "inputs"),
    [
        (standard, rows), (loss, rows), (running, rows), (counted, rows), (perceptron, rows), (perceptron, batch),
        (attention, batch),
    ],
)  # fmt: skip
def test_what_mixes_rows_runs_between(program: Callable[..., Any], inputs: Callable[[int], Inputs]) -> None:
    compiled, why = run(program, inputs)
    assert not why and not compiled


def turned(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return a.flip(0) * 2 + b


def soft_over_rows(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(a * 2, 0) * b


def crossed(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (a.t() * 2 + b.t()).t()


def neighbours(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    a = a * 2
    return a[1:] - a[:-1] + b[1:]


def checked(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return F.embedding((a[:, 0] * 0).long() + 1, w.outer(w)) * b


def marked(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    a = a * 2
    a[:, 0] = b[:, 0]
    return a


@pytest.mark.parametrize("program", [turned, soft_over_rows, crossed, neighbours, checked, marked])
def test_what_is_not_computed_row_by_row_is_left_alone_and_it_is_said_why(program: Callable[..., Any]) -> None:
    _, why = run(program, rows)
    assert why


def test_where_all_results_are_dropped_it_is_said_why_nothing_is_made() -> None:
    weight = torch.linspace(0.5, 2.0, 8)
    with events("lengths") as seen, fused_eager():
        for i in range(MANY):
            norm(*rows(40 + 7 * i), weight)
            sync()
    assert {e.data["why"] for e in seen} == {"no tensor sees what it computes"}


def test_a_stream_that_differs_in_more_than_its_length_is_not_one_of_them() -> None:
    def program(a: Tensor, b: Tensor, keep: bool) -> Tensor:
        return a.mean(-1, keepdim=keep).exp() * 2 if keep else (a.mean(-1, keepdim=keep).exp() * 2).unsqueeze(-1)

    with fused_eager():
        for i in range(MANY):
            for keep in (True, False):
                a, b = rows(40 + 7 * i)
                got = program(a, b, keep)
                sync()
                torch.testing.assert_close(got, a.mean(-1, keepdim=True).exp() * 2, rtol=1e-5, atol=1e-5)


def test_arguments_are_told_apart_by_their_types_and_signs() -> None:
    assert _is_same([1, (2.0, None)], [1, (2.0, None)])
    assert _is_same({"dim": -1}, {"dim": -1}) and _is_same([float("nan")], [float("nan")])
    for a, b in [(1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (1, 2)]:
        assert not _is_same(a, b)


def test_lengths_below_a_block_and_sizes_of_one_run_as_before() -> None:
    with fused_eager():
        for n in [*range(60, 60 + MANY), 1, 2, 3, 8, 15, 16, 17, 61, 128, 1000]:
            a, b = rows(n)
            got = chain(a, b, a)
            sync()
            torch.testing.assert_close(got, chain(a.clone(), b, a), rtol=2e-5, atol=2e-5)


def test_parts_of_memory_are_computed_where_they_are() -> None:
    """Slices of a larger storage begin anywhere, and what was computed before is read where it is on the device."""
    base, other = torch.randn(400, 8), torch.randn(400, 8)
    with fused_eager():
        for i in range(MANY):
            n = 40 + 7 * i
            before = base[i : n + i] * 1.0
            sync()
            got = chain(base[i : n + i], other[3 : n + 3], base) + before
            sync()
            wanted = chain(base[i : n + i], other[3 : n + 3], base) + base[i : n + i]
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_in_the_background_the_program_goes_on_until_it_is_there() -> None:
    with events("lengths", "compile") as seen, fused_eager(compile="auto", native="never"):
        for i in range(60):
            a, b = rows(40 + 7 * i)
            got = norm(a, b, torch.ones(8)).sum().item()
            with fused_eager(mode="off"):
                wanted = norm(a, b, torch.ones(8)).sum().item()
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-3)
            if i % 10 == 9:
                sync(compiled=True)
    assert {e.data["why"] for e in seen if e.kind == "lengths"} == {""}
    assert sum(e.kind == "compile" for e in seen) <= 2


def test_forgotten_executables_are_made_again() -> None:
    run(chain, rows)
    load.forget()
    run(chain, rows)


def test_shapes_that_take_turns_are_no_two_lengths() -> None:
    """What comes again in the same shape says nothing about rows, and what is shorter than a block does."""
    with events("lengths") as seen, fused_eager():
        for i in range(MANY):
            for n in (5, 40 + 7 * i):
                for keep in (True, False):
                    a, b = rows(n)
                    c = a * 2
                    got = chain(c, b, a)
                    if not keep:
                        del c
                    sync()
                    torch.testing.assert_close(got, chain(a * 2, b, a), rtol=2e-5, atol=2e-5)
    assert {e.data["why"] for e in seen} == {""}


def test_a_length_of_one_is_no_axis_of_rows() -> None:
    """Two axes count the rows, one of which is 1 for a while: two kinds of streams, each of any length."""
    with events("lengths") as seen:
        for i in range(2 * MANY):
            first = 1 if i < MANY else 2 + i % 3
            a, b = torch.randn(first, 40 + 7 * i, 8), torch.randn(first, 40 + 7 * i, 8)
            with fused_eager():
                got = norm(a, b, torch.ones(8))
                sync()
            torch.testing.assert_close(got, norm(a, b, torch.ones(8)), rtol=2e-5, atol=2e-5)
    assert [e.data["why"] for e in seen] == ["", ""]
