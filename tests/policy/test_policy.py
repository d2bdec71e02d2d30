"""The states of a thread, and the ways between them that the docstring of `policy.policy` draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from fused_eager.policy import autotuner, hotness
from fused_eager.policy.allowance import LEAST, Allowance, Shadowed
from fused_eager.policy.alone import TOLD_EVERY
from fused_eager.policy.hotness import PATIENCE
from fused_eager.policy.policy import Policy, State
from fused_eager.policy.times import SAMPLES
from tests.streams import events

from .clock import Clock

LINE = ((lambda: None).__code__, 1)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    autotuner.forget()
    yield
    autotuner.forget()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(monkeypatch)
    clock.now = 1.0  # 0 stands for never
    return clock


def segments(policy: Policy, clock: Clock, fused: float, native: float, count: int) -> list[State]:
    """Some segments that take so long: in which state each ran."""
    states = []
    for _ in range(count):
        policy.pass_boundary(LINE, True, stepped=False, idle=False, compiling=False)
        policy.begin(LINE, "op", [(2, 2)])
        states.append(policy.state)
        clock.now += native if policy.runs_natively(measures=True) else fused
    policy.pass_boundary(LINE, True, stepped=False, idle=False, compiling=False)
    return states


def test_a_thread_begins_fused(clock: Clock) -> None:
    policy = Policy()
    assert policy.state is State.FUSED and not policy.runs_natively(measures=True)


def test_a_segment_that_is_faster_natively_runs_so_and_later_the_other_way_is_tried(clock: Clock) -> None:
    with events("choice") as seen:
        states = segments(Policy(), clock, fused=2.0, native=1.0, count=2000)
    first = states.index(State.NATIVE)
    assert first == SAMPLES and set(states[:first]) == {State.FUSED}
    again = states.index(State.FUSED, first)
    assert states[again:].count(State.NATIVE) > 10 * states[again:].count(State.FUSED)
    assert all(e.data["native"] for e in seen) and len(seen) >= 2


def test_a_segment_that_is_faster_fused_stays_so(clock: Clock) -> None:
    with events("choice") as seen:
        states = segments(Policy(), clock, fused=1.0, native=2.0, count=100)
    assert states[-1] is State.FUSED and State.NATIVE in states
    assert not seen[-1].data["native"]


def used_up(policy: Policy) -> None:
    allowance, seen = Allowance(), Shadowed(written=1.0)

    class Beginning:
        reached, spent = 0, 0.0

    allowance.give_up(Beginning(), seen, 100, policy.backoff)


def unstable(policy: Policy) -> None:
    for i in range(PATIENCE):
        policy.flushed(None, False, i)


def strayed(policy: Policy) -> None:
    policy.backoff.rest_until_sync()


def compiling(policy: Policy) -> None:
    policy.backoff.rest(lambda: True)


@pytest.mark.parametrize(
    ("event", "why"),
    [(used_up, "region.new"), (unstable, "region.unstable"), (strayed, "region.new"), (compiling, "region.new")],
)
def test_a_thread_rests_until_a_sync_point(event: Callable[[Policy], None], why: str, clock: Clock) -> None:
    policy = Policy()
    event(policy)
    assert policy.state is State.RESTING and policy.reason == why
    assert policy.runs_natively(measures=False), "a rest holds where nothing is measured, too"
    clock.now += LEAST * hotness.LONGEST  # enough comes together
    for _ in range(hotness.BACKOFF):
        policy.pass_sync()
    assert policy.state is State.FUSED


def test_a_rest_ends_where_a_segment_is_natively_faster(clock: Clock) -> None:
    policy = Policy()
    segments(policy, clock, fused=2.0, native=1.0, count=2 * SAMPLES)
    strayed(policy)
    assert policy.state is State.RESTING
    policy.pass_sync()
    policy.begin(LINE, "op", [(2, 2)])
    assert policy.state is State.NATIVE and policy.reason == "region.native"


def test_what_is_read_while_something_is_compiled_is_no_time(clock: Clock) -> None:
    policy = Policy()
    for _ in range(4 * SAMPLES):
        policy.pass_boundary(LINE, True, stepped=False, idle=False, compiling=True)
        policy.begin(LINE, "op", [(2, 2)])
        clock.now += 1.0
    assert policy.pass_boundary(LINE, True, stepped=False, idle=False, compiling=True), "it had better rest"
    assert policy.autotuner.running is not None and policy.autotuner.running.is_unknown


def test_of_torch_alone_it_is_told_how_long_and_why(clock: Clock) -> None:
    policy = Policy()
    strayed(policy)
    with events("bypass") as seen:
        policy.begin(LINE, "op", [])
        policy.bypass("step", math.inf)
        for _ in range(4):
            clock.now += 0.3 * TOLD_EVERY
            assert not policy.end_turn_bypassed("step", 1, clock.now)
        policy.alone.pass_on(False)
    assert [(e.data["turns"], e.data["reason"]) for e in seen] == [(4, "region.new"), (0, "region.new")]
    assert sum(e.data["seconds"] for e in seen) == pytest.approx(1.2 * TOLD_EVERY)


def test_our_mode_comes_back_when_turns_take_another_time(clock: Clock) -> None:
    policy = Policy()
    policy.bypass("step", math.inf)
    back = []
    for seconds in [1.0] * 8 + [9.0] * 8:
        clock.now += seconds
        back.append(policy.end_turn_bypassed("step", 1, clock.now))
    assert not any(back[:8]) and any(back[8:])
