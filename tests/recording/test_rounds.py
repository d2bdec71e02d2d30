"""Loops that never stop for a value are cut alike each time, whatever the length of their rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fused_eager import fused_eager, report, sync
from fused_eager.frontends.context.threads import current_door
from fused_eager.policy import autotuner
from fused_eager.policy.times import SAMPLES
from tests.streams import events

LIMIT = 64  # ops; no multiple of any of the rounds below


def from_outside(x: Tensor, carried: Tensor) -> Tensor:
    """14 ops of values from outside of the stream, on one line twice."""
    y = x
    for k in range(7):
        y = y * 0.75
        y = y + float(k)
    return y


def carried_on(x: Tensor, carried: Tensor) -> Tensor:
    """5 ops that go on with what the last round has made."""
    a = carried.sin()
    b = a * 0.5
    c = b + x
    d = c.tanh()
    return d - 0.25


def in_place(x: Tensor, carried: Tensor) -> Tensor:
    """3 ops that write to what the last round has written."""
    carried.mul_(0.9)
    carried.add_(x)
    return carried.clamp_(-2, 2)


@pytest.mark.parametrize("round", [from_outside, carried_on, in_place])
def test_a_loop_is_cut_alike_each_time(round: Callable[[Tensor, Tensor], Tensor]) -> None:
    def loop() -> Tensor:
        x, carried = torch.linspace(-1, 1, 24), torch.linspace(0, 1, 24)
        for _ in range(100):
            carried = round(x, carried)
        return carried

    plain = loop()
    with events("flush", "plan") as seen, fused_eager(max_pending=LIMIT, native="never", compile="wait"):
        first = loop()
        sync()
        compiled = report().compilations
        again = loop()
        sync()
        assert report().compilations == compiled, "the second loop compiles nothing"
        torch.testing.assert_close(first, plain)
        assert torch.equal(first, again)
    full = [event.data for event in seen if event.data.get("reason") == "cut.full"]
    assert len(full) >= 8 and all(LIMIT // 2 <= flush["ops"] <= LIMIT for flush in full)
    settled = full[3 : len(full) // 2]  # of the first loop, but for what begins with the ops before it
    (plan,) = {flush["plan"] for flush in settled}
    regions = [e.data["regions"] for e in seen if e.kind == "plan" and e.data["plan"] == plan]
    assert {region["how"] for region in regions[0]} == {"xla"}


def test_the_first_op_may_come_again_with_what_has_no_memory() -> None:
    def loop(values: list[Tensor]) -> Tensor:
        total: Tensor | float = 0.0
        for value in values:
            y = value * 2.0  # what the stream begins with
            total = total + (y.to_dense() if y.is_sparse else y).tanh()
        assert isinstance(total, Tensor)
        return total

    values = [torch.linspace(-1, 1, 4) + k for k in range(11)]
    values += [torch.eye(4)[0].to_sparse(), *values]
    with fused_eager(max_pending=LIMIT, native="never", compile="wait"):
        ours = loop(values)
    torch.testing.assert_close(ours, loop(values))


@pytest.mark.parametrize("round", [from_outside, in_place])
def test_what_is_taken_up_in_the_middle_begins_with_a_round(round: Callable[[Tensor, Tensor], Tensor]) -> None:
    begun = []
    x, carried = torch.linspace(-1, 1, 24), torch.linspace(0, 1, 24)
    with fused_eager(max_pending=LIMIT, native="never") as _, events("flush") as seen:
        door = current_door()
        assert door is not None
        for before in (2, 5, 9):
            for k in range(before):  # ops of the loop that somebody has left natively
                carried = carried * (1.0 - 1e-3 * k)
            sync()
            door.rounds.align()
            for _ in range(60):
                carried = round(x, carried)
                first = door.stream.nodes[0] if door.stream.nodes else None
                begun.append(first.place if first is not None else None)
            sync()
    places = {place for place in begun if place is not None}
    assert len(places) == 1, "each stream begins on the same line"
    lengths = [event.data["ops"] for event in seen if event.data.get("reason") == "cut.full"]
    assert lengths and len(set(lengths)) == 1


def test_rounds_are_timed_where_nothing_else_tells_them_apart() -> None:
    """A loop that reads nothing and steps no optimizer: fused and natively, and one of the two is chosen."""
    autotuner.forget()
    x = torch.linspace(-1, 1, 24)
    y, limit = x, time.monotonic() + 60
    with fused_eager(max_pending=LIMIT, native="measured", compile="wait"):
        door = current_door()
        assert door is not None
        while (found := door.stream.policy.autotuner.running) is None or found.chosen is None or found.trying:
            y = from_outside(x, y)
            assert time.monotonic() < limit, "no choice is made"
        assert len(found.fused.of(found.end)) + len(found.native.of(found.end)) >= SAMPLES
        assert found.fused.of(found.end), "it was timed fused"
        for _ in range(200):  # whichever was chosen
            y = from_outside(x, y)
    torch.testing.assert_close(y, from_outside(x, x))
