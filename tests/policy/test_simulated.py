"""A minute of a loop, simulated: whatever the machine and the two ways do, the better one is found and kept.

Each way takes its own times, and the machine makes both slower or faster. What is compared is what the way that ran
takes on average at that moment, with what the better one would.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fused_eager.policy import autotuner
from fused_eager.policy.autotuner import ALIKE, SEGMENTS, Autotuner
from fused_eager.policy.segment import Choice, Segment

from .clock import Clock

pytestmark = pytest.mark.slow

MINUTE, LATE = 60.0, 50.0  # seconds; from the second on, the better way is to have been found
STEP = 0.02  # seconds of a native step, about
RATIOS = 0.5, 0.9, 1.1, 2.0
REGRET, OFF = 0.03, 0.05  # of the minute; of the end of it

HERE = (lambda: None).__code__, 1

Own = Callable[[float], float]  # what a way takes at a time, on average
Noise = Callable[[float, random.Random], float]


def _spikes(t: float, chance: random.Random) -> float:
    return chance.uniform(3, 10) if chance.random() < 0.05 else chance.uniform(0.98, 1.04)


MACHINES: dict[str, Noise] = {
    "quiet": lambda t, chance: chance.uniform(0.99, 1.01),
    "noisy": lambda t, chance: max(0.8, chance.gauss(1, 0.08)),
    "busy moments": _spikes,
    "two speeds": lambda t, chance: (1.3 if int(t / 1.7) % 2 else 1.0) * chance.uniform(0.98, 1.02),
    "slower from half on": lambda t, chance: (1.4 if t > 25 else 1.0) * chance.uniform(0.98, 1.02),
}
STEADY: Own = lambda t: 1.0  # noqa: E731
WAYS: dict[str, Own] = {
    "is steady": STEADY,
    "gets slower": lambda t: 0.8 + min(t, 40.0) / 100,
    "gets faster": lambda t: 1.2 - min(t, 40.0) / 100,
    "is another program": lambda t: 0.8 if t < 20 else 1.2,
    "warms up": lambda t: 1 + 1.5 * 2 ** (-t),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@dataclass
class Result:
    """How much more time steps took than the better way's: of the minute, and of the end of it."""

    regret: float
    late: float


def simulate(
    clock: Clock, machine: Noise, fused: Own, native: Own, known: Choice | None = None, swing: float = 0.0
) -> Result:
    """The loop for a minute of its own time. `known` is what another process has found; by `swing` each fused step
    takes more or less than the average."""
    autotuner.forget()
    clock.now = 0.0
    chance, own = random.Random(0), Autotuner()
    own.passed(HERE, True)
    spent = best = late = late_best = 0.0
    if known is not None:
        own.begin(HERE, "op")
        segment = own.running
        assert segment is not None
        segment.offered = ((HERE, False), known)
        own.passed(HERE, True)
    while (now := clock.now) < MINUTE:
        own.begin(HERE, "op")
        averages = {False: STEP * fused(now), True: STEP * native(now)}
        took = averages[own.native] * machine(now, chance)
        if not own.native:
            took *= chance.choice((1 - swing, 1 + swing))
        spent, best = spent + averages[own.native], best + min(averages.values())
        if now > LATE:
            late, late_best = late + averages[own.native], late_best + min(averages.values())
        clock.now += took
        own.passed(HERE, not own.native)
    return Result(spent / best - 1, late / late_best - 1)


def slower(way: Own, times: float) -> Own:
    return lambda t: times * way(t)


# The choice goes by the fastest of three segments, and does not see that the kept way has become the slower one until
# the next look. Averages of more segments end right in all of these; but the MLP step of the benchmarks took 0.94 to
# 1.04 of eager's time with variants of them instead of 0.91 to 0.93, and why is not known yet.
MISSED = pytest.mark.xfail(reason="the fastest of three segments decides", strict=False)
MISSES = {
    *(("fused", machine) for machine in ("quiet", "noisy", "busy moments", "two speeds")),
    *(("native", machine) for machine in ("noisy", "busy moments", "two speeds", "slower from half on")),
    ("both", "noisy"),
}


@pytest.mark.parametrize(
    ("which", "machine"),
    [
        pytest.param(which, machine, marks=[MISSED] if (which, machine) in MISSES else [])
        for which in ("fused", "native", "both")
        for machine in MACHINES
    ],
)
def test_it_ends_in_the_better_way(clock: Clock, which: str, machine: str) -> None:
    """Fused over native is one of `RATIOS`, but for what `which` of them does. Of those minutes one may be missed: busy
    moments may fall on all that is timed of one way."""
    missed = []
    for does, ratio in itertools.product(WAYS, RATIOS):
        fused = slower(WAYS[does] if which != "native" else STEADY, ratio)
        found = simulate(clock, MACHINES[machine], fused, WAYS[does] if which != "fused" else STEADY)
        if found.late > OFF or found.regret > REGRET:
            missed.append((does, ratio, found))
    assert len(missed) <= (machine == "busy moments"), missed


@pytest.mark.parametrize(
    "ratio", [pytest.param(0.8, marks=MISSED), 0.9, pytest.param(1.1, marks=MISSED), 1.25]
)
def test_steps_may_take_turns_at_two_lengths(clock: Clock, ratio: float) -> None:
    found = simulate(clock, MACHINES["quiet"], slower(STEADY, ratio), STEADY, swing=0.2)
    assert found.late <= OFF and found.regret <= REGRET, found


@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.25, 2.0])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("machine", MACHINES)
def test_what_another_process_found_may_be_wrong_here(clock: Clock, machine: str, native: bool, ratio: float) -> None:
    """It is measured anew where that costs little, and seldom where it costs much."""
    says = Choice(native, fused_s=STEP * (2.0 if native else 0.5), native_s=STEP)
    found = simulate(clock, MACHINES[machine], slower(STEADY, ratio), STEADY, known=says)
    assert found.late <= OFF, found


def test_the_tables_are_those_of_the_process(clock: Clock) -> None:
    simulate(clock, MACHINES["quiet"], slower(STEADY, 2.0), STEADY)
    assert all(isinstance(each, Segment) for table in (SEGMENTS, ALIKE) for each in table.values())
