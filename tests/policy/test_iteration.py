"""Whole turns: torch alone is tried where each segment has its way, and kept where all together are faster so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.compiling import background
from fused_eager.frontends.context.threads import current_door
from fused_eager.policy import autotuner, times
from fused_eager.policy.alone import Turns
from fused_eager.policy.iteration import TIMED, Iteration
from fused_eager.policy.segment import AGAIN, LOSS, SOON, Segment
from tests.streams import CLOCKS, events

LINE = ("f.py", 1)


def turn(iteration: Iteration, now: float, *ways: bool | None) -> float:
    """A turn of segments that go these ways (natively, or None where that is being tried) ends at `now`."""
    for native in ways:
        iteration.begins(Segment(LINE, chosen=native))
    return 0.0 if iteration.passes_by() else iteration.ended(now)


def timed(
    iteration: Iteration, takes: float, *ways: bool | None, start: float = 0.0, turns: int = TIMED + 1
) -> list[float]:
    """What comes of so many turns that take that long, the first of which begins unseen."""
    return [turn(iteration, start + takes * (k + 1), *ways) for k in range(turns)]


def test_torch_is_tried_once_turns_have_been_timed() -> None:
    iteration = Iteration()
    found = timed(iteration, 2.0, False, True)
    assert found[:-1] == [0.0] * TIMED
    assert found[-1] == 2 * 2.0 * (TIMED + 1)
    assert iteration.trying and iteration.fused_s == 2.0


@pytest.mark.parametrize(
    "ways", [(True, True), (False, None), ()], ids=["all native", "being tried", "none"]
)
def test_other_turns_do_not_count(ways: tuple[bool | None, ...]) -> None:
    assert not any(timed(Iteration(), 2.0, *ways, turns=5 * TIMED))


def test_a_loop_of_one_segment_is_left_to_that() -> None:
    iteration, only = Iteration(), Segment(LINE, chosen=False)
    for now in range(1, 20):
        iteration.begins(only)
        assert iteration.passes_by() or not iteration.ended(float(now))
    assert not iteration.took


def test_turns_of_two_optimizers_are_one_loop() -> None:
    """Each is one segment; one takes 3 s, the other 1 s, so both together take 2 s in the middle."""
    iteration, pair, now = Iteration(), [Segment(LINE, chosen=True), Segment(LINE, chosen=False)], 0.0
    for k in range(TIMED + 1):
        iteration.begins(pair[k % 2])
        now += (3.0, 1.0)[k % 2]
        assert not iteration.passes_by()
        until = iteration.ended(now)
    assert until and iteration.fused_s == 2.0
    turns = Turns("step", now)
    for seconds in (5.0, 1.0, 3.0, 1.0, 3.0, 1.0):
        now += seconds
        turns.ended(now)
    assert turns.middle == 2.0, "the first one pays for the change, and one of the others has no second"
    assert not Turns("step", now).middle


def chosen() -> Iteration:
    """What is known of a loop whose turns begin with "conv" and [8, 3], for which torch alone is faster."""
    iteration, now = Iteration(), 0.0
    while not iteration.trying:
        one(iteration, now := now + 2.0, "conv", (8, 3))
    assert iteration.tried(now + 10.0, 1.0) and iteration.alone
    return iteration


def one(iteration: Iteration, now: float, start: str, shape: tuple[int, ...]) -> float:
    iteration.begins(Segment(LINE, chosen=False), start, (shape,))
    iteration.begins(Segment(LINE, chosen=True), "loss", ())
    return 0.0 if iteration.passes_by() else iteration.ended(now)


def test_what_was_found_does_not_hold_for_another_loop_that_is_entered_there() -> None:
    """A function may train one model after the other."""
    for start, shape in (("linear", (8, 3)), ("conv", (8, 4))):
        iteration = chosen()
        now = iteration.until - 1.0
        for k in range(1, TIMED):
            assert one(iteration, now, start, shape) == 0.0 and iteration.strangers == k
        assert one(iteration, now, start, shape) == 0.0 and not iteration.alone and not iteration.length
        found = [one(iteration, now := now + 2.0, start, shape) for _ in range(TIMED + 1)]
        assert any(found) and iteration.trying, "it is measured"


def test_a_turn_that_begins_otherwise_now_and_then_changes_nothing() -> None:
    """As the first of each context may."""
    iteration = chosen()
    until, now = iteration.until, iteration.until - 1.0
    for _ in range(5):
        assert one(iteration, now, "normalise", (9,)) == 0.0
        assert one(iteration, now, "conv", (8, 3)) == until
    assert iteration.alone and not iteration.strangers


def test_turns_of_other_lengths_each_time_are_of_one_loop() -> None:
    iteration, now = Iteration(), 0.0
    while not iteration.trying:
        now += 2.0
        one(iteration, now, "conv", (int(now), 3))
    assert iteration.tried(now + 10.0, 1.0)
    assert one(iteration, now + 11.0, "conv", (99, 3)) == iteration.until
    assert one(iteration, now + 11.0, "linear", (99, 3)) == 0.0


def test_a_turn_that_was_disturbed_does_not_count() -> None:
    iteration = Iteration()
    for now in range(1, 20):
        iteration.disturb()
        assert not turn(iteration, float(now), False, False)
    assert not iteration.took


def test_the_faster_one_is_kept_and_the_other_tried_again_later_and_later() -> None:
    iteration, lengths, now = Iteration(), [], 0.0
    for _ in range(3):
        until = timed(iteration, 2.0, False, True, start=now)[-1]
        assert iteration.tried(until, 1.9) and iteration.alone
        lengths.append(iteration.length)
        assert turn(iteration, until + iteration.length / 2, False, True) == iteration.until
        now = iteration.until
        assert not turn(iteration, now + 1e-9, False, True), "it is to be found out anew"
        now += 1.0
    first = max(SOON * 1.9, TIMED * (2.0 - 1.9) / LOSS)
    assert lengths == pytest.approx([first, 2 * first, 4 * first])


def test_where_torch_is_slower_it_is_left_at_that() -> None:
    iteration = Iteration()
    until = timed(iteration, 2.0, False, False)[-1]
    assert iteration.tried(until, 4.0) and not iteration.alone
    assert iteration.length == max(AGAIN * 2.0, TIMED * 2.0 / LOSS)
    assert not any(timed(iteration, 2.0, False, False, start=until, turns=AGAIN // 2))


def test_what_is_not_known_is_no_reason_to_go_on_alone() -> None:
    iteration = Iteration()
    assert not iteration.tried(1.0, 0.5), "nobody has asked for it"
    until = timed(iteration, 2.0, False, True)[-1]
    assert iteration.tried(until, 0.0) and not iteration.alone


def test_another_loop_is_found_out_from_the_beginning() -> None:
    iteration = Iteration()
    until = timed(iteration, 2.0, False, True)[-1]
    iteration.tried(until, 1.0)
    iteration.forget()
    assert turn(iteration, until + 1.0, False, True) == 0.0
    found = timed(iteration, 2.0, False, True, start=until + 1.0, turns=TIMED)
    assert found[-1] and not any(found[:-1])


class Costs:
    """A clock on which time passes by what the program does: each segment by its own way, and the change of ways."""

    def __init__(self) -> None:
        self.now, self.native = 0.0, False

    def perf_counter(self) -> float:
        return self.now

    def spend(self, native: bool, fused_s: float, native_s: float) -> None:
        self.now += (native_s if native else fused_s) + (native is not self.native)
        self.native = native


@pytest.mark.parametrize("native_s", [0.9, 1.4])
def test_a_loop_of_two_segments_ends_up_on_the_faster_way_of_all(
    native_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was found to be faster fused, beside the other; natively both take 0.9 or 1.4 of that."""
    autotuner.forget()
    monkeypatch.setattr(times, "FACTOR", math.inf)
    clock = Costs()
    for module in CLOCKS:
        monkeypatch.setattr(f"fused_eager.{module}.time", clock)

    def choose(self: Segment) -> bool:
        self.chosen, self.until = False, math.inf
        return False

    monkeypatch.setattr(Segment, "wants_native", choose)
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    alone: list[bool] = []

    def step() -> float:
        door: Any = current_door()
        alone.append(door.bypassed)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(3):
            loss = (w * w).sum()
            loss.backward()
            total += loss.item()
            clock.spend(door.bypassed, 1.0, native_s)
        optimizer.step()
        background.wait()
        return total

    with events("choice") as seen, fused_eager(native="measured", compile="auto"):
        losses = [step() for _ in range(6 * TIMED)]
    reference = torch.ones(3, requires_grad=True)
    other = torch.optim.SGD([reference], lr=0.1)
    for loss in losses:
        other.zero_grad()
        total = sum(float((reference * reference).sum().detach()) for _ in range(3))
        (3 * (reference * reference).sum()).backward()
        other.step()
        assert loss == pytest.approx(total, rel=1e-5)
    assert any(alone), "it was tried"
    assert alone[-1] is (native_s < 1.0)
    assert [e.data["native"] for e in seen] == [native_s < 1.0]
