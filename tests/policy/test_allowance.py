"""Allowance: writing ops down takes a share of the time at most, and nothing that it interrupts is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fused_eager import current_mode, fused_eager, sync
from fused_eager.compiling import background, emit
from fused_eager.executing import run
from fused_eager.frontends.context import bypass, intercept, parking
from fused_eager.frontends.context.threads import current_door
from fused_eager.log.events import LOG
from fused_eager.policy import allowance, alone, autotuner, hotness, policy, segment
from fused_eager.policy.allowance import ALLOWANCE, HALVINGS, LEAST, PATIENCE, SHARE, VAIN, Shadowed
from fused_eager.quiet import stack
from fused_eager.recording import shadow
from fused_eager.tracing import trace
from tests.streams import events, forget_pending, forget_shapes, open_stream

COST = 1e-3  # seconds that writing an op down, or following it, takes here
LONG = 1.001 * LEAST / SHARE  # in which enough comes together


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    background.wait()
    forget_shapes()
    forget_pending()
    background.FORMS.clear()
    trace.MEMORY.forget()
    yield
    background.wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A process that has just begun, on a clock that stands still but while ops are recorded."""
    clock, record = Clock(), intercept.record.record

    def recorded(*args: Any) -> Any:
        clock.now += COST
        return record(*args)

    # Whoever charges for what is done, or compares its times.
    for module in (allowance, hotness, shadow, run, alone, autotuner, policy, segment):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(emit, "now", clock.perf_counter)
    monkeypatch.setattr(intercept.record, "record", recorded)
    for name, value in vars(allowance.Allowance()).items():
        monkeypatch.setattr(ALLOWANCE, name, value)
    return clock


def auto() -> fused_eager:
    return fused_eager(compile="auto", native="measured", follower="python")


def chain(x: torch.Tensor, ops: int) -> torch.Tensor:
    for i in range(ops):
        x = x * 2 if i % 2 else x * 0.5
    return x


def recorded() -> int:
    """How many ops the thread's stream has."""
    return len(open_stream().nodes)


def test_a_program_begins_natively(clock: Clock) -> None:
    x = torch.arange(6.0)
    with auto():
        y = chain(x, 4)
        assert not recorded() and torch.equal(y, x)
        sync()
        chain(x, 4)
        assert not recorded(), "no time has passed"
        clock.now += LONG
        chain(x, 4)
        assert not recorded(), "it goes on where a round begins"
        sync()
        y = chain(x, 4)
        assert recorded() == 4 and open_stream().shadowed
        assert torch.equal(y, x)


def test_a_stream_is_written_down_in_several_rounds(clock: Clock) -> None:
    x, reached, rests = torch.arange(6.0), [], len(LOG.of("rest"))
    with auto():
        for _ in range(4):
            clock.now += 100.0
            sync()
            y = chain(x, 40)
            reached.append(recorded())
            assert torch.equal(y, x)
    told = [e.data for e in LOG.of("rest")[rests:]]
    # The first is written down until ten milliseconds are over, and each further one for as long as it took to come
    # there: that is how it can be done in a few rounds.
    assert [e["ops"] for e in told] == [0, 11, 23] and reached == [0, 0, 40, 40]
    assert [e["before"] for e in told] == [0, 0, 11]
    assert [round(e["seconds"] / COST) for e in told] == [0, 11, 12]


def test_what_was_written_down_in_several_rounds_is_compiled(clock: Clock) -> None:
    x = torch.arange(6.0)
    with auto():
        for _ in range(6):
            clock.now += 100.0
            sync(compiled=True)
            y = chain(x, 40)
            sync()
            assert torch.equal(y, x)
        with events("flush", "compile") as seen:
            clock.now += 100.0
            chain(x, 40)
            sync()
    assert [e.data["regions"] for e in seen if e.kind == "flush"] == [1]


def test_where_ops_are_large_no_stream_is_given_up(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shadow.run_natively

    def slowly(*args: Any) -> Any:
        clock.now += 5 * COST
        return run(*args)

    monkeypatch.setattr(shadow, "run_natively", slowly)
    x = torch.arange(6.0)
    with auto():
        clock.now += LONG
        sync()
        chain(x, 200)
        assert recorded() == 200


def test_what_it_takes_is_owed(clock: Clock) -> None:
    x = torch.arange(6.0)
    with auto():
        clock.now += LONG
        sync()
        chain(x, 40)
        assert ALLOWANCE.saved < LEAST and ALLOWANCE.vain == 1
        clock.now += (LEAST - ALLOWANCE.saved) / SHARE - 1e-4
        sync()
        assert open_stream().policy.backoff.left
        clock.now += 2e-4
        sync()
        assert not open_stream().policy.backoff.left


def test_what_never_comes_again_gets_less_and_less(clock: Clock) -> None:
    waits = []
    with auto():
        for i in range(VAIN * (HALVINGS + 2)):
            sync()
            began = clock.now
            while open_stream().policy.backoff.left:
                clock.now += LONG / 8
                sync()
            waits.append(clock.now - began)
            chain(torch.arange(float(3 + i)), 40)
            assert open_stream().policy.backoff.left, "given up"
    waits = waits[1 + VAIN :: VAIN]  # the first is the beginning's
    times = [b / a for a, b in itertools.pairwise(waits)]
    assert all(1.6 < t < 2.4 for t in times[: HALVINGS - 2]) and all(0.9 < t < 1.1 for t in times[HALVINGS - 1 :])


def test_what_comes_again_gets_its_share_back(clock: Clock) -> None:
    with auto():
        for ops in (40, 50, 60):
            clock.now += 100.0
            sync()
            chain(torch.arange(float(ops)), 40)
        assert ALLOWANCE.vain == 3
        clock.now += 1000.0
        sync()
        chain(torch.arange(60.0), 40)
        assert ALLOWANCE.vain == 0


def test_a_thread_that_passes_no_sync_point_goes_on_all_the_same(clock: Clock) -> None:
    x = torch.arange(6.0)
    with auto():
        chain(x, 4)
        clock.now += PATIENCE - 1e-3
        chain(x, 4)
        assert not recorded()
        clock.now += 2e-3
        chain(x, 4)
        assert recorded() == 4


def test_time_outside_of_contexts_does_not_count(clock: Clock) -> None:
    x = torch.arange(6.0)
    for _ in range(3):
        clock.now += 100.0
        with auto():
            chain(x, 4)
            sync()
            chain(x, 4)
            assert not recorded()
    for _ in range(5):
        with auto():
            clock.now += LONG / 4
            chain(x, 4)
    with auto():
        chain(x, 4)
        assert recorded() == 4, "time in several contexts adds up"


@pytest.mark.parametrize("options", [{"native": "never", "compile": "auto"}, {"native": "measured", "compile": "wait"}])
def test_what_is_to_be_recorded_or_waited_for_is(clock: Clock, options: dict[str, Any]) -> None:
    x = torch.arange(6.0)
    with fused_eager(**options):
        chain(x, 40)
        assert recorded() == 40


def test_where_a_report_is_wanted_all_is_recorded(clock: Clock) -> None:
    x = torch.arange(6.0)
    with events("flush") as seen, auto():
        chain(x, 40)
        sync()
    assert [e.data["ops"] for e in seen] == [40]


# ---- training ----------------------------------------------------------------------------------------------------


def training() -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    x, y = torch.randn(8, 5), torch.randint(0, 3, (8,))
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("pause", [0.0, LONG / 8, LONG, 100.0])
def test_training_comes_to_the_same(clock: Clock, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = training()
    step = torch.optim.AdamW.step

    def later(self: Any, *args: Any, **kwargs: Any) -> Any:
        clock.now += pause
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", later)
    with auto():
        losses, parameters = training()
    torch.testing.assert_close(losses, wanted[0])
    torch.testing.assert_close(parameters, wanted[1])


def test_an_optimizer_is_left_to_torch_while_the_thread_rests(clock: Clock) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    seen = []
    with auto():
        door = current_door()
        assert door is not None
        optimizer = torch.optim.Adam([w], foreach=False)
        w.register_hook(lambda g: seen.append((door in stack(), float(g.sum()))))
        (w * 2).sum().backward()
        assert door.bypassed, "from the end of a backward pass"
        optimizer.step()
        assert door.bypassed, "its turn comes round, and not enough has come together"
        clock.now += 100.0
        (w * 2).sum().backward()
        optimizer.step()
        assert not door.bypassed
    assert seen == [(False, 6.0)] * 2 and current_mode() == "off"


def test_passes_that_nothing_follows_are_turns(clock: Clock) -> None:
    w = torch.ones(3, requires_grad=True)
    with auto():
        door = current_door()
        assert door is not None
        (w * 2).sum().backward()
        assert door.bypassed
        clock.now += 100.0
        (w * 2).sum().backward()
        assert not door.bypassed
        chain(w.detach(), 3)
        assert recorded() == 3


def test_a_pass_that_fails_leaves_the_front_door_where_it_was(clock: Clock) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("a hook of the program's")

    w = torch.ones(3, requires_grad=True)
    with auto():
        y = w * 2
        y.register_hook(fail)
        with pytest.raises(ValueError, match="a hook of the program's"):
            y.sum().backward()
        assert current_door() in stack() and not current_door().hidden  # type: ignore[union-attr]
    assert not stack()


# ---- what learning may cost altogether ----------------------------------------------------------------------------

EAGER = 1e-3 / 4  # seconds that an op takes natively here; a step of 20 takes 5 ms
STEP = 20


def count_recorded(clock: Clock, seconds: float, contexts: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A loop whose steps are of 32 lengths in turn, as a growing cache is: ops that are recorded in each second."""
    autotuner.forget()
    for module in (alone, autotuner, policy, segment, bypass):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(parking, "AGAIN", 4)
    monkeypatch.setattr(parking, "GRACE", float("inf"))
    monkeypatch.setattr(ALLOWANCE, "purse", allowance.PURSE)
    counts, record, began = [0] * int(seconds), intercept.record.record, clock.now

    def counted(*args: Any) -> Any:
        counts[min(int(clock.now - began), len(counts) - 1)] += 1
        return record(*args)

    monkeypatch.setattr(intercept.record, "record", counted)
    monkeypatch.setattr(background.Waiting, "ask", lambda self: None)  # nothing is ever compiled

    def step(i: int) -> None:
        y = chain(torch.arange(3.0 + i % 32), STEP)
        clock.now += STEP * EAGER
        y.sum().item()

    i = 0
    with auto() if contexts == "around" else nullcontext():
        while clock.now - began < seconds:
            with auto() if contexts == "each" else nullcontext():
                step(i)
            i += 1
    parking.clear()
    return counts


@pytest.mark.parametrize("contexts", ["around", "each"])
def test_where_nothing_is_compiled_recording_falls_to_a_percent(
    clock: Clock, contexts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it comes: the ops that are recorded cost what the purse allows, and in the end its refill."""
    counts = count_recorded(clock, 30.0, contexts, monkeypatch)
    spent = [COST * n for n in counts]
    assert sum(spent) <= allowance.PURSE + 30.0 * allowance.REFILL + 2 * STEP * COST
    assert sum(spent[20:]) <= 10.0 * allowance.REFILL + 2 * STEP * COST
    assert sum(spent[:10]) > 20 * COST, "it does look"


def test_what_has_paid_may_go_on(clock: Clock) -> None:
    ALLOWANCE.purse = -1.0
    ALLOWANCE.paid()
    assert ALLOWANCE.purse == allowance.PAID - 1.0
    ALLOWANCE.purse = allowance.PURSE - 0.1
    ALLOWANCE.paid()
    assert ALLOWANCE.purse == allowance.PURSE


def learning(clock: Clock, seconds: float, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float]:
    """A step of a model that takes all of the purse to write down once, again and again: after how many a part of
    it was asked to be compiled, and what has been spent in the end."""
    asked, spent, record = [], [0.0], intercept.record.record

    def counted(*args: Any) -> Any:
        spent[0] += COST
        return record(*args)

    def ask(self: background.Waiting) -> None:
        asked.append(self.ops)
        self.asked = compiles

    monkeypatch.setattr(intercept.record, "record", counted)
    monkeypatch.setattr(background.Waiting, "ask", ask)
    x, began, parts = torch.arange(32.0), clock.now, 10
    with auto():
        while clock.now - began < seconds:
            for part in range(parts):
                y = chain(x[: 16 + part], int(allowance.PURSE / COST) // parts)
                clock.now += 0.1
                y.sum().item()
    return len(asked), spent[0]


def test_a_model_that_takes_more_than_is_in_the_purse_is_compiled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, spent = learning(clock, 100.0, True, monkeypatch)
    # What comes together in that time, and the part that has begun when nothing is left.
    further = allowance.REFILL * 100.0 + allowance.PURSE / 10
    assert parts >= 5 and allowance.PURSE < spent < allowance.PURSE + allowance.CREDIT + further
    assert ALLOWANCE.credit < allowance.CREDIT


def test_credit_is_given_until_something_has_paid() -> None:
    a, first = allowance.Allowance(), trace._root()
    for _ in range(10):
        a.ended(first, Shadowed(written=0.9, followed=0.1), 0.0, compiles=True)
        a.purse -= 1.0  # as each op takes it
    assert a.credit == 0.0
    a.paid()
    assert a.credit == allowance.CREDIT


def test_what_a_stream_has_cost_comes_back_once_it_is_compiled() -> None:
    a, first = allowance.Allowance(), trace._root()
    for compiles in (False, False, True):
        a.purse -= 0.25
        a.ended(first, Shadowed(written=0.25), 0.25, compiles)
    assert a.purse == allowance.PURSE and first.spent == 0.0 and a.credit == allowance.CREDIT - allowance.PURSE
