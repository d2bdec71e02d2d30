"""The choice between fused and native segments: made from times alone, and never one that changes a number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.policy import autotuner
from fused_eager.policy.autotuner import ENTRIES, IDLE, SOME, Autotuner
from fused_eager.policy.hotness import VARIANTS
from fused_eager.policy.segment import AGAIN, LOSS, SOON, Segment
from fused_eager.policy.times import SAMPLES, SURPRISES, Place, usual

from .clock import Clock

HERE, THERE = (lambda: None).__code__, (lambda: 1).__code__
READ, OTHER = (HERE, 1), (THERE, 2)


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    autotuner.forget()


def ways(
    clock: Clock, fused: float, native: float, segments: int, own: Autotuner | None = None, first: object = "op",
    idle: bool = False,
) -> list[bool]:
    """Which segments of a loop with one read ran natively, where they take so long."""
    own, ran = own or Autotuner(), []
    own.passed(READ, True)
    for _ in range(segments):
        own.begin(READ, first)
        ran.append(own.native)
        clock.now += native if own.native else fused
        own.passed(READ, not own.native, idle=idle)
    return ran


# Each way, and before fused is chosen torch alone.
MEASURED = [False] * SAMPLES + [True] * 2 * SAMPLES


def test_the_faster_way_is_kept_after_a_few_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ran = ways(clock, fused=2.0, native=1.0, segments=AGAIN)
    assert ran == [False] * SAMPLES + [True] * (AGAIN - SAMPLES)


@pytest.mark.parametrize(("fused", "native"), [(0.96, True), (0.94, False)])
def test_fused_has_to_be_clearly_faster(fused: float, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = ways(Clock(monkeypatch), fused=fused, native=1.0, segments=SOON)
    assert ran == MEASURED + [native] * (SOON - len(MEASURED))


def test_what_is_many_times_slower_is_not_tried_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once natively to change ways and twice to measure it; and torch alone cannot be so much faster."""
    ran = ways(Clock(monkeypatch), fused=0.1, native=1.0, segments=SOON)
    assert ran == [False] * SAMPLES + [True] * 3 + [False] * (SOON - SAMPLES - 3)


def test_chance_decides_nothing_where_both_ways_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading finished values, say: nothing was recorded, and fused is our mode in torch's way."""
    many = len(MEASURED) + 2  # after which fused would be chosen; the other way is tried again a little later
    ran = ways(Clock(monkeypatch), fused=1.0, native=1.5, segments=many, idle=True)
    assert ran == [False] * SAMPLES + [True] * (many - SAMPLES)


def test_nor_when_the_other_way_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = ways(Clock(monkeypatch), fused=1.0, native=1.5, segments=8 * AGAIN, idle=True)
    runs = [(native, len(list(together))) for native, together in itertools.groupby(ran)]
    tries = [length for native, length in runs if not native]
    assert len(tries) > 3 and max(tries) <= SAMPLES, "our mode was held on to"


def test_a_few_reads_do_not_speak_for_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may come after them that is faster fused, and torch alone would not see it begin. Many do, for as long
    again."""
    clock, own = Clock(monkeypatch), Autotuner()
    ways(clock, fused=1e-3, native=1e-3, segments=IDLE, own=own, idle=True)
    assert own.chose_native and not own.suits_torch_alone
    ways(clock, fused=1e-3, native=1e-3, segments=1, own=own, idle=True)
    assert own.suits_torch_alone
    assert own.rest("read") - clock.now == pytest.approx(1e-3 * IDLE)
    own.resume(0.0, 0.0)
    assert not own.suits_torch_alone
    ways(clock, fused=2.0, native=1.0, segments=4 * SAMPLES, own=own, first="step")
    assert own.suits_torch_alone, "what was measured to be faster natively does at once"


def test_what_is_recorded_later_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that was the same both ways, and is not any more."""
    clock, own = Clock(monkeypatch), Autotuner()
    ways(clock, fused=1.0, native=1.0, segments=AGAIN, own=own, idle=True)
    ran = ways(clock, fused=0.5, native=1.0, segments=8 * AGAIN, own=own)
    assert not any(ran[-SOON:])


def test_one_slow_moment_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(monkeypatch), Autotuner()
    ways(clock, fused=1.0, native=0.5, segments=SAMPLES + 1, own=own)
    ways(clock, fused=1.0, native=10.0, segments=1, own=own)
    assert ways(clock, fused=1.0, native=0.5, segments=SAMPLES, own=own) == [True] * SAMPLES


def test_the_first_segment_of_a_context_goes_the_way_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no read before it, and is not timed: entering the context is a part of it."""
    clock = Clock(monkeypatch)
    ways(clock, fused=2.0, native=1.0, segments=2 * SAMPLES)
    for first, native in (("op", True), ("other", False)):
        entering = Autotuner()
        entering.begin(READ, first)
        assert entering.native is native
        clock.now += 100.0
        entering.passed(READ, True)
    assert all(ways(clock, fused=2.0, native=1.0, segments=3))


def one_step(clock: Clock, place: object, fused: float, native: float, exit: float = 0.0) -> bool:
    """A context that is one step, which reads a value, and that takes `exit` more to leave where it ran fused."""
    own = Autotuner()
    until = own.enter(place)
    if clock.now < until:
        clock.now += native
        return True
    own.begin(READ, "op")
    clock.now += native if own.native else fused
    own.passed(READ, not own.native)
    if not own.native:
        clock.now += exit
        own.amend(exit)
    own.leave(bypassed=False)
    return own.native


@pytest.mark.parametrize(("fused", "exit", "native"), [(2.0, 0.0, True), (0.5, 0.0, False), (0.5, 1.0, True)])
def test_contexts_of_one_step_are_measured_from_end_to_end(
    fused: float, exit: float, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    ran = [one_step(clock, HERE, fused, 1.0, exit) for _ in range(SOON)]
    assert ran == MEASURED + [native] * (SOON - len(MEASURED))
    assert one_step(clock, THERE, fused, 1.0, exit) is native, "another place goes the same way"


TAKE = {"tiny": (2e-2, 1e-2), "large": (5e-3, 1e-2)}  # fused and natively


def a_context(clock: Clock, place: Place, firsts: Sequence[str]) -> bool:
    """One that is entered there, and what it reads; whether torch is alone in it."""
    own = Autotuner()
    alone = own.enter(place) > clock.now
    for first in firsts:
        if not alone:
            own.begin(READ, first)
        clock.now += TAKE[first][alone or own.native]
        if not alone:
            own.passed(READ, True)
    own.leave(alone)
    return alone


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(monkeypatch)
    for first, (fused, native) in TAKE.items():
        ways(clock, fused, native, segments=len(MEASURED) + 2, first=first)
    return clock


@pytest.mark.parametrize(("firsts", "alone"), [(["tiny"], True), (["tiny", "large"], False)])
def test_a_context_of_which_a_part_is_fused_is_entered_recording(
    measured: Clock, firsts: list[str], alone: bool
) -> None:
    assert [a_context(measured, "with", firsts) for _ in range(SOME + 1)] == [False] * SOME + [alone]


@pytest.mark.parametrize(("before", "alone"), [(SOME - 1, False), (SOME, True)])
def test_a_function_that_is_called_for_two_models_is_alone_for_none_of_them(
    measured: Clock, before: int, alone: bool
) -> None:
    """One is faster fused, and its turn comes so seldom that some in a row are not: more have to be when that is seen,
    which it is not as long as torch is alone."""
    turns = [["tiny"]] * before + [["large"]] + ([["tiny"]] * (SOME + 3) + [["large"]]) * 8
    ran = [a_context(measured, "function", firsts) for firsts in turns]
    assert ran == [False] * before + [alone] * (len(turns) - before)
    assert ENTRIES["function", "entry"].enough == (SOME if alone else 2 * (SOME + 4))


def test_torch_below_our_mode_is_not_taken_for_another_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found to take 1.0 alone, and takes 3.0 at the beginning of each context."""
    clock, own = Clock(monkeypatch), Autotuner()
    own.passed(READ, True)
    segment = Segment(READ)
    for way, seconds in ((False, 2.5), (True, 3.0)):
        for _ in range(SAMPLES):
            assert segment.wants_native() is way
            segment.took(seconds, way, READ)
    assert segment.wants_native() and segment.trying
    segment.alone.append(1.0)
    clock.now = 100.0
    assert segment.wants_native() and not segment.trying
    for _ in range(2 * SURPRISES):
        segment.took(3.0, True, READ)
    assert segment.chosen, "3.0 is what it takes there"


def test_a_close_call_is_looked_at_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy moment decided is not kept for as long as a clear choice."""
    clock, own = Clock(monkeypatch), Autotuner()
    wrong = ways(clock, fused=1.0, native=0.99, segments=2 * SAMPLES, own=own)
    assert wrong == MEASURED[: 2 * SAMPLES]
    later = ways(clock, fused=0.8, native=0.99, segments=4 * SOON, own=own)
    began = later.index(False)
    assert SOON <= began <= SOON + 2
    again = [False] * SAMPLES + [True] * 2 * SAMPLES  # natively, for what it takes by now, and torch alone
    assert later[began:] == again + [False] * (4 * SOON - began - len(again))


def test_the_other_way_is_compared_with_what_the_kept_one_takes_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused was chosen at a busy moment, and is as far ahead at a quiet one."""
    clock, own = Clock(monkeypatch), Autotuner()
    busy = ways(clock, fused=1.4, native=1.6, segments=len(MEASURED) + 1, own=own)
    assert busy == [*MEASURED, False]
    quiet = ways(clock, fused=0.9, native=1.0, segments=AGAIN, own=own)
    assert any(quiet), "it has been tried again"
    assert not any(quiet[-AGAIN // 4 :])


@pytest.mark.parametrize(("fused", "native"), [(1.4, 1.0), (1.0, 2.4)])
def test_the_way_that_is_kept_is_not_given_up_for_times_of_another_phase(
    fused: float, native: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that did a lot between two reads stops doing it when the other way is tried again."""
    clock, own, ran, host = Clock(monkeypatch), Autotuner(), [], 8.0
    own.passed(READ, True)
    better = native < fused
    for _ in range(4 * AGAIN):
        own.begin(READ, "op")
        ran.append(own.native)
        if len(ran) > len(MEASURED) + SOON and own.native is not better:
            host = 0.0
        clock.now += host + (native if own.native else fused)
        own.passed(READ, not own.native)
    assert host == 0.0, "it has been tried again"
    assert ran[-AGAIN:].count(better) > 0.9 * AGAIN
    changed = len(ran) - ran[::-1].index(not better)
    assert ran[changed - SAMPLES : changed].count(not better) == SAMPLES
    assert ran.count(not better) <= 6 * SAMPLES, "it was not given up"


def test_what_contexts_take_to_leave_counts_where_the_way_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ran = [one_step(clock, HERE, 0.5, 1.0, 0.4) for _ in range(AGAIN)]
    ran += [one_step(clock, HERE, 0.5, 0.7, 0.4) for _ in range(AGAIN)]
    assert not any(ran[len(MEASURED) : 2 * len(MEASURED)]) and all(ran[-AGAIN // 4 :])


def test_fused_has_to_be_faster_than_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only than torch below our mode, which takes twice as long here. What is measured aside decides."""
    clock, own, ran = Clock(monkeypatch), Autotuner(), []
    own.passed(READ, True)
    own.rest("read")
    while len(ran) < len(MEASURED) + SAMPLES:
        own.begin(READ, "op")
        ran.append(own.native)
        clock.now += 2.0 if own.native else 1.5
        own.passed(READ, not own.native)
        if own.rest("read") > clock.now:
            clock.now += 1.0
            own.resume(1.0, 1.0)
            own.begin(READ, "op")  # not timed: the program has done something meanwhile
            own.passed(READ, True)
    assert all(ran[len(MEASURED) :]), "1.5 is less than 2.0, and more than 1.0"


def test_the_other_way_is_tried_again_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ran = ways(clock, fused=2.0, native=1.0, segments=20 * AGAIN)
    lengths = [len(list(group)) for way, group in itertools.groupby(ran) if way]
    assert lengths[1] > 1.9 * lengths[0] and lengths[2] > 1.9 * lengths[1]
    assert sum(ran) > 0.98 * len(ran)


def test_trying_a_far_slower_way_again_costs_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of tiny ops, of which XLA makes something slow: it is tried seldom, and one segment tells."""
    clock = Clock(monkeypatch)
    ran = ways(clock, fused=50.0, native=1.0, segments=4 * AGAIN)
    assert ran[:SAMPLES] == [False] * SAMPLES and all(ran[SAMPLES : 20 * AGAIN // 10])
    own = Autotuner()
    began, tried = clock.now, 0
    for _ in range(40):
        tried += ways(clock, fused=50.0, native=1.0, segments=4 * AGAIN, own=own).count(False)
    assert 0 < 50.0 * tried < 1.1 * LOSS * (clock.now - began)


def test_short_segments_may_take_twice_as_long_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a microsecond's work takes depends on who is asked in between."""
    clock, own = Clock(monkeypatch), Autotuner()
    assert ways(clock, fused=2e-5, native=1e-5, segments=2 * SAMPLES, own=own)[-1]
    assert all(ways(clock, fused=2e-5, native=5e-5, segments=2 * SURPRISES, own=own))
    assert not all(ways(clock, fused=1e-3, native=5e-3, segments=2 * SURPRISES, own=own))


def test_a_choice_is_revised_when_the_times_change(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(monkeypatch), Autotuner()
    ways(clock, fused=2.0, native=1.0, segments=AGAIN, own=own)
    later = ways(clock, fused=0.5, native=1.0, segments=2 * AGAIN, own=own)
    assert not any(later[-AGAIN // 2 :])


def test_a_short_segment_that_begins_like_a_long_one_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third time the loop reads a value right after its step: natively in no time, and fused too."""
    clock, own, ran = Clock(monkeypatch), Autotuner(), []
    own.passed(READ, True)
    for i in range(60):
        own.begin(READ, "op")
        short = i % 3 == 2
        ran.append(own.native)
        clock.now += (0.001 if own.native else 0.002) if short else (1.2 if own.native else 1.0)
        own.passed(OTHER if short else READ, True)
        if short:
            own.begin(OTHER, "other op")
            own.passed(READ, True)
    assert any(ran) and not any(ran[-30:])


def test_disturbed_segments_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(monkeypatch), Autotuner()
    own.passed(READ, True)
    for _ in range(50):
        own.begin(READ, "op")
        clock.now += 100.0
        own.restart()  # something was compiled
        own.passed(READ, True)
    assert autotuner.SEGMENTS and not any(s.fused.by_end for s in autotuner.SEGMENTS.values()) and not own.native


def test_numbers_of_the_host_are_no_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Autotuner()
    own.begin(READ, "op")
    own.passed(OTHER, False)
    assert not autotuner.BOUNDARIES and not own.waiting


def test_two_reads_in_turn_are_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own, ran = Clock(monkeypatch), Autotuner(), {READ: [], OTHER: []}
    for _ in range(100):
        for place, fused, native in ((READ, 2.0, 1.0), (OTHER, 1.0, 2.0)):
            own.begin(READ, "op")
            clock.now += native if own.native else fused
            ran[place].append(own.native)
            own.passed(place, True)
    assert all(ran[READ][-50:]) and not any(ran[OTHER][-50:])


def test_two_models_that_are_read_by_one_line_are_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert ways(clock, fused=2.0, native=1.0, segments=50, first="tiny")[-1]
    assert not ways(clock, fused=1.0, native=2.0, segments=50, first="large")[-1]
    assert ways(clock, fused=2.0, native=1.0, segments=50, first="tiny")[-1]


def test_a_segment_that_has_become_another_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(monkeypatch), Autotuner()
    assert ways(clock, fused=2.0, native=1.0, segments=20, own=own)[-1]
    ran = ways(clock, fused=10.0, native=30.0, segments=20, own=own)
    assert ran[:SURPRISES] == [True] * SURPRISES and not any(ran[-4:])


def test_one_slow_segment_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(monkeypatch), Autotuner()
    ways(clock, fused=2.0, native=1.0, segments=20, own=own)
    for _ in range(10):
        assert all(ways(clock, fused=2.0, native=10.0, segments=1, own=own))
        assert all(ways(clock, fused=2.0, native=1.0, segments=2, own=own))


def test_what_is_not_compiled_because_its_shapes_change_is_measured_as_it_runs() -> None:
    """An optimizer's step on the shapes of the sixth model of a process: the rest of the step is compiled."""

    def changing(n: int) -> float:
        return ((torch.ones(n) * 3 + 1).sqrt() - 7).square().sum().item()

    def stable() -> float:
        return (torch.ones(4) * 2).exp().sum().item()

    with fused_eager(native="measured", compile="wait"):
        for n in range(3, 3 + VARIANTS):
            changing(n)
        autotuner.forget()
        for _ in range(2 * SAMPLES):
            assert changing(40) == 40 * 25.0
            stable()
    line = changing.__code__.co_firstlineno + 1
    found = [s for (_, place, _), s in autotuner.SEGMENTS.items() if place[1] == line]
    assert any(s.fused.count + s.native.count >= SAMPLES for s in found)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Every segment runs the other way than the one before."""
    asked: list[bool] = []

    def other_way(self: Segment) -> bool:
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    monkeypatch.setattr(Segment, "wants_native", other_way)
    yield asked


def test_changing_ways_changes_no_number(in_turn: list[bool]) -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4)
        )
        # Not Adam: it makes steps of full size from the rounding errors that a bias before a norm has as its gradient.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        x, y, mean, losses = torch.randn(12, 8), torch.randint(4, (12,)), torch.zeros(8), []
        for i in range(12):
            mean[i % 8 :] += x.mean(0)[i % 8 :]
            loss = torch.nn.functional.cross_entropy(model(x - mean), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [*losses, mean.sum().item(), model[1].running_mean.sum().item()]

    wanted = train()
    with fused_eager(native="measured"):
        got = train()
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert len(in_turn) >= 10 and any(in_turn)


@pytest.mark.parametrize("options", [{"native": "never"}, {"native": "measured", "compile": "blocking"}], ids=str)
def test_options_forbid_it(in_turn: list[bool], options: dict[str, str]) -> None:
    x = torch.randn(8)
    with fused_eager(**options):
        for _ in range(6):
            (x * 2).sum().item()
    assert not in_turn


def test_what_an_optimizer_reads_for_itself_is_no_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.norm().item()
            return super().step(closure)

    model = torch.nn.Linear(4, 2)
    optimizer, x = Reading(model.parameters(), lr=0.01), torch.randn(8, 4)
    with fused_eager(native="measured"):
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    assert sum(not stepped for _, stepped in autotuner.BOUNDARIES) == 1  # the read of the loss


def test_a_function_that_may_raise_ends_no_segment() -> None:
    spd = torch.eye(4) * 2
    with fused_eager(native="measured", compile="wait"):
        for _ in range(6 * SAMPLES):
            total = (torch.linalg.cholesky(spd * 2) + 1).sum() + torch.linalg.inv(spd).sum()
            assert total.item() > 0
    assert len(autotuner.BOUNDARIES) == 1  # the read of the total
    assert any(known.native.count for known in autotuner.SEGMENTS.values())


def test_segments_of_changing_length_are_compared_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own, ran = Clock(monkeypatch), Autotuner(), []
    own.passed(READ, True)
    for n in range(1, 40):
        size = 100 * (7 * n % 11 + 1)
        own.begin(READ, "op", [(size,)])
        if n == 1:
            own.varies()
        ran.append(own.native)
        # Once in a while torch has a length that suits it.
        clock.now += size * ((1e-5 if n % 5 == 0 else 2e-4) if own.native else 1e-4)
        own.passed(READ, not own.native)
    ways = [False] * (1 + 2 * SAMPLES) + [True] * 2 * SAMPLES
    assert ran[: len(ways)] == ways and not any(ran[-10:])
    (found,) = [s for s in autotuner.SEGMENTS.values() if s.size]
    assert usual(found.native.of(found.end), True)[0] == pytest.approx(2 * usual(found.fused.of(found.end), True)[0])
