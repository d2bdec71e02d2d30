"""Stepping aside: the front door leaves the stack of modes where torch alone is faster, and nothing is missed."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_eager import fused_eager, report, sync
from fused_eager.frontends.context.bypass import READS
from fused_eager.frontends.context.threads import current_door
from fused_eager.log.events import LOG, Event
from fused_eager.policy import autotuner, times
from fused_eager.policy.alone import LOOKED_AT, Turns
from fused_eager.policy.segment import Segment
from fused_eager.policy.times import SAMPLES
from fused_eager.quiet import stack
from fused_eager.reporting.text import facts_lines
from tests.streams import CLOCKS, forget_shapes


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner.forget()
    forget_shapes()
    monkeypatch.setattr(times, "FACTOR", math.inf)  # on a busy machine any segment may take twice as long


class Ticking:
    """A clock that goes on each time it is looked at: aside, that is once in a turn."""

    TICK = 1e-6

    def __init__(self) -> None:
        self.ticks = 0

    def perf_counter(self) -> float:
        self.ticks += 1
        return self.ticks * self.TICK


@pytest.fixture
def native_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement says native, for the next twelve turns at most."""
    _native_wins(monkeypatch, 12)


@pytest.fixture
def native_wins_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above: entering and leaving a context, a step looks at the clock more often, and how often differs."""
    _native_wins(monkeypatch, 60)


@pytest.fixture
def native_wins_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; in a step there are many boundaries, and looks at the clock."""
    _native_wins(monkeypatch, 400)


def _native_wins(monkeypatch: pytest.MonkeyPatch, ticks: int) -> None:
    clock = Ticking()
    for module in CLOCKS:
        monkeypatch.setattr(f"fused_eager.{module}.time", clock)

    def choose(self: Segment) -> bool:
        self.chosen, self.until = True, clock.perf_counter() + ticks * clock.TICK
        return True

    monkeypatch.setattr(Segment, "_choose", choose)
    monkeypatch.setattr(Segment, "_tells", lambda self: True)


def trainer(read: bool) -> Callable[[], torch.Tensor]:
    """A training step; `read` says whether it reads its loss."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(8, 4)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if read:
            loss.item()
        return loss.detach()

    return step


@pytest.mark.parametrize("read", [True, False])
def test_where_native_wins_the_front_door_steps_aside_and_comes_back(native_wins: None, read: bool) -> None:
    plain = trainer(read)
    wanted = [plain().item() for _ in range(60)]
    step, bypassed = trainer(read), []
    with fused_eager(native="measured"):
        door = current_door()
        assert door is not None
        losses = []
        for _ in range(60):
            losses.append(step())
            bypassed.append(door.bypassed)
            assert (door in stack()) is not door.bypassed
    assert not stack()
    assert [x.item() for x in losses] == pytest.approx(wanted, rel=1e-4)
    ways = [(way, len(list(group))) for way, group in itertools.groupby(bypassed)]
    assert len(ways) >= 4  # away and back, at least twice
    assert all(count <= 13 for way, count in ways if way)


def test_a_function_that_is_a_context_of_its_own_runs_alone_where_that_is_faster(
    native_wins_for_some_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entering is a part of each segment; where all of a context was native, the next one begins aside."""
    monkeypatch.setattr(autotuner, "SOME", 2)
    plain, ways = trainer(True), []
    wanted = [plain().item() for _ in range(40)]
    train = trainer(True)

    @fused_eager(native="measured")
    def step() -> tuple[float, bool]:
        began = current_door().bypassed  # type: ignore[union-attr]
        return train().item(), began

    for value in wanted:
        loss, began = step()
        ways.append(began)
        assert loss == pytest.approx(value, rel=1e-4)
        assert not stack()
    assert any(ways) and not all(ways[-20:]), "it looks again now and then"
    assert not any(ways[: 2 * SAMPLES]), "both ways were measured first"


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def stand_aside(step: Callable[[], Any]) -> Any:
    door = current_door()
    assert door is not None
    for _ in range(60):
        step()
        if door.bypassed:
            return door
    raise AssertionError("it never stepped aside")


def test_modes_and_contexts_of_the_user_while_it_stands_aside(native_wins: None) -> None:
    step = trainer(True)
    with fused_eager(native="measured"):
        door = stand_aside(step)
        with Counting() as counting:
            for _ in range(12):  # it comes back below the user's mode
                step()
                assert stack()[-1] is counting
            assert counting.seen > 12
        assert counting not in stack()
        door = stand_aside(step)
        with fused_eager(mode="strict"):
            assert stack() == [door]
            assert (torch.ones(3) * 2).tolist() == [2.0] * 3
        door = stand_aside(step)
        with pytest.raises(KeyError), Counting():
            raise KeyError
    assert not stack()
    with fused_eager(mode="fused"):
        assert len(stack()) == 1


SEEN = [  # what is asked for where the ops are to be seen, whoever runs them faster
    {"mode": "debug", "check_nan": True},
    {"mode": "strict"},
    {"compile": "wait", "native": "never"},
    {"native": "never"},
    {"verify": 1.0},
]


def is_seen(options: dict[str, Any]) -> bool:
    """Whether the ops of a context with these options are recorded, or checked."""
    before = len(LOG.events)
    with fused_eager(**options):
        try:
            assert (torch.ones(3) - 2).log().isnan().all()
        except FloatingPointError:
            return "check_nan" in options
    return bool(told(before)[1]) and "check_nan" not in options


@pytest.mark.parametrize("options", SEEN, ids=str)
def test_a_context_below_a_mode_in_one_that_was_entered_aside(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(autotuner.Autotuner, "enter", lambda self, place: math.inf)
    # Torch keeps one flag for all threads, and two that enter and leave at a time leave it wrong.
    before = _python_dispatch.is_in_torch_dispatch_mode()
    for _ in range(3):
        with fused_eager(native="measured"):
            assert current_door().bypassed and not stack()  # type: ignore[union-attr]
            with Counting() as counting:
                assert is_seen(options)
                assert stack()[-1] is counting
        assert not stack() and _python_dispatch.is_in_torch_dispatch_mode() == before


@pytest.mark.parametrize("options", SEEN, ids=str)
def test_a_context_in_a_thread_of_one_that_stands_aside(native_wins: None, options: dict[str, Any]) -> None:
    """What is pending in it would meet the trap, for who stands aside does not see that he reads a value."""
    step, seen, made = trainer(True), [], []

    def body() -> None:
        for _ in range(3):
            seen.append(is_seen(options))
            with fused_eager(**{**options, "check_nan": None}):
                made.append(torch.ones(3) * 2 + 1)
                ready.set()
                go.wait(30)
                go.clear()

    with fused_eager(native="measured"):
        stand_aside(step)
        ready, go = threading.Event(), threading.Event()
        thread = threading.Thread(target=body)
        thread.start()
        for k in range(3):
            assert ready.wait(30)
            ready.clear()
            assert made[k].tolist() == [3.0] * 3
            assert (made[k] + 1).sum().item() == 12.0
            go.set()
        thread.join()
    assert seen == [True] * 3


def test_a_thread_started_while_it_stands_aside(native_wins: None) -> None:
    step, found = trainer(True), []

    def body() -> None:
        found.append((len(stack()), (torch.ones(3) * 2).tolist()))

    with fused_eager(native="measured"):
        stand_aside(step)
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert found == [(1, [2.0] * 3)]


def test_a_thread_of_a_thread_started_while_it_stands_aside(native_wins: None) -> None:
    step, found = trainer(True), []

    def inner() -> None:
        found.append((torch.ones(3) * 2).tolist())
        assert not current_door().stream.nodes  # type: ignore[union-attr]
        y = torch.ones(3) * 3
        assert not current_door().stream.nodes, "what it makes is not pending"  # type: ignore[union-attr]
        found.append(y)

    def outer() -> None:
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()

    with fused_eager(native="measured"):
        stand_aside(step)
        thread = threading.Thread(target=outer)
        thread.start()
        thread.join()
        assert len(found) == 2 and (found[1] + 1).tolist() == [4.0] * 3


def test_what_other_threads_make_while_it_stands_aside_can_be_read(native_wins: None) -> None:
    step, ready, go, made = trainer(True), threading.Event(), threading.Event(), []

    def body() -> None:
        made.append(torch.ones(3) * 2)  # pending when the starter steps aside
        ready.set()
        go.wait(30)
        made.append(torch.ones(3) * 3)  # made while it stands aside
        ready.set()

    with fused_eager(native="measured"):
        thread = threading.Thread(target=body)
        thread.start()
        ready.wait(30)
        ready.clear()
        stand_aside(step)
        assert (made[0] + 1).tolist() == [3.0] * 3
        go.set()
        ready.wait(30)
        assert (made[1] + 1).tolist() == [4.0] * 3
        thread.join()


def test_what_a_job_of_someone_aside_takes_is_no_measurement(native_wins_for_long: None) -> None:
    """It runs natively, whatever suits its ops elsewhere; told as fused it would decide for that."""
    step, seen = trainer(True), []

    def job() -> torch.Tensor:
        mine = current_door()
        assert mine is not None and mine.lender is not None
        y = torch.ones(3)
        for _ in range(4):
            y = y * 2
            y.sum().item()
            tuner = mine.policy.autotuner
            seen.append((tuner.native, tuner.running, len(mine.stream.nodes)))
        return y

    with concurrent.futures.ThreadPoolExecutor(1) as pool, fused_eager(native="measured"):
        stand_aside(step)
        before = dict(autotuner.SEGMENTS)
        y = pool.submit(job).result()
        assert dict(autotuner.SEGMENTS) == before
        assert y.tolist() == [16.0] * 3
    assert seen == [(True, None, 0)] * 4


def test_what_is_handed_out_while_aside_sees_what_is_written_later(native_wins_for_long: None) -> None:
    step, x = trainer(True), torch.zeros(3)
    with fused_eager(native="measured"):
        stand_aside(step)
        door = current_door()
        seen = x.numpy()
        assert door is not None and door.bypassed and not door.hidden
        door.come_back()
        x.add_(1)
        assert seen.tolist() == [1.0] * 3


def test_what_printing_reads_for_itself_is_one_turn(native_wins_for_some_steps: None) -> None:
    x = torch.arange(300.0) / 7
    wanted = str(x[:90])
    with fused_eager(native="measured"):
        stand_aside(lambda: float(x.sum()))
        door = current_door()
        assert door is not None and door.policy.alone.turns.kind == "read"
        count = door.policy.alone.turns.count
        assert str(x[:90]) == wanted
        assert door.policy.alone.turns.count == count + 1


def test_beside_a_context_of_another_thread_it_does_not_step_aside(native_wins: None) -> None:
    step, ready, go = trainer(True), threading.Event(), threading.Event()

    def body() -> None:
        with fused_eager(mode="fused"):
            x = torch.ones(3) * 2
            ready.set()
            go.wait(30)
            assert x.tolist() == [2.0] * 3

    thread = threading.Thread(target=body)
    thread.start()
    ready.wait(30)
    before = len(LOG.events)
    with fused_eager(native="measured"):
        for _ in range(40):
            step()
            assert not current_door().bypassed  # type: ignore[union-attr]
    go.set()
    thread.join()
    # Every step is told of: as one whose ops were passed on to torch, or as a flush.
    alone, flushes = told(before)
    assert {e.data["turn"] for e in alone if e.data["turns"]} == {"step"}
    rounds = sum(e.data["turns"] for e in alone)
    recorded = collections.Counter(e.data["reason"] for e in flushes).most_common(1)[0][1]
    assert rounds >= 10 and 40 <= rounds + recorded <= 41


def told(before: int) -> tuple[list[Event], list[Event]]:
    """Since then: when torch was alone, and the flushes."""
    events = list(LOG.events)[before:]
    return [e for e in events if e.kind == "bypass"], [e for e in events if e.kind == "flush"]


@pytest.mark.parametrize("kind", ["read", "sync"])
def test_rounds_that_are_passed_on_are_told(native_wins: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("fused_eager.frontends.context.bypass._is_alone", lambda door: False)
    x, before = torch.ones(4), len(LOG.events)
    with fused_eager(native="measured"):
        for _ in range(30):
            y = (x * 2).sum()
            sync() if kind == "sync" else float(y)
    alone, flushes = told(before)
    rounds = sum(e.data["turns"] for e in alone)
    assert rounds >= 10 and 30 <= rounds + len(flushes) <= 31
    assert {e.data["turn"] for e in alone if e.data["turns"]} == {kind}
    assert {e.data["reason"] for e in alone} == {"region.native"}
    assert all(e.data["seconds"] > 0 for e in alone)


def test_of_a_round_that_is_passed_on_in_part_the_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is not counted as one of torch's alone."""
    monkeypatch.setattr("fused_eager.frontends.context.bypass._is_alone", lambda door: False)
    ways = itertools.cycle([True, False])
    monkeypatch.setattr(Segment, "wants_native", lambda self: next(ways))
    x, before = torch.ones(4), len(LOG.events)
    with fused_eager(native="measured"):
        for _ in range(10):
            float((x * 2).sum())
            float((x * 3).sum())
    alone, flushes = told(before)
    assert len(flushes) == 10
    assert [e.data["turns"] for e in alone][1:] == [0] * 9  # before the first read nobody knows what comes round
    assert all(e.data["seconds"] > 0 for e in alone)


def turns(step: Callable[[], Any], count: int) -> list[bool]:
    """After which calls of a step the front door stood aside."""
    out = []
    door = current_door()
    assert door is not None
    for _ in range(count):
        step()
        out.append(door.bypassed)
        assert (door in stack()) is not door.bypassed
    return out


def test_a_call_of_sync_is_a_turn(native_wins: None) -> None:
    x = torch.arange(6.0)

    def step() -> None:
        y = x * 2 + 1
        sync()
        assert y.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]

    with fused_eager(native="measured"):
        bypassed = turns(step, 60)
    assert any(bypassed) and not all(bypassed[-10:])


@pytest.fixture
def growing() -> Iterator[Callable[[], float]]:
    """Generating: a module is called with more and more rows, and a value is read each time."""
    model, rows = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), [torch.ones(1, 4)]

    def step() -> float:
        with torch.no_grad():
            rows.append(model(torch.cat(rows[-200:]))[-1:])
        return float(rows[-1].sum())

    yield step


def test_where_nothing_else_comes_round_reads_do(growing: Callable[[], float]) -> None:
    with fused_eager(native="measured"):
        bypassed = turns(growing, 160)
        assert sum(bypassed) > 100, "shapes that never come again are torch's alone"
        assert not all(bypassed[READS:]), "it comes back to see whether they have settled"
    assert not stack()


@pytest.mark.parametrize(
    "read",
    [*map(methodcaller, ("item", "tolist", "numpy")), bool, int, float, complex, str, range(9).__getitem__],
    ids=["item", "tolist", "numpy", "bool", "int", "float", "complex", "str", "index"],
)
def test_any_read_is_a_turn(native_wins: None, read: Callable[[torch.Tensor], Any]) -> None:
    """Also those that no dispatcher sees. They hand out what they do in eager."""
    x = torch.arange(3)
    wanted = read((x * 2 + 1).sum() - 1)
    found = []
    with fused_eager(native="measured"):
        bypassed = turns(lambda: found.append(read((x * 2 + 1).sum() - 1)), 120)
    assert all(value == wanted for value in found)
    assert any(bypassed) and not all(bypassed[-60:])


def test_turns_that_were_not_looked_at_are_counted_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "FACTOR", 2.0)
    turns = Turns("read", 1.0)
    fast = [turns.ended(1.0 + 1e-3 * k, 100) for k in range(1, 21)]
    assert all(fast) and turns.count == 2000 and turns.usual == pytest.approx(1e-5)
    slow = [turns.ended(2.0 + 2e-3 * k) for k in range(8 * times.SURPRISES)]
    assert not all(slow), "each takes 2 ms now"


@pytest.mark.parametrize("kind", ["read", "step"])
def test_of_turns_that_come_fast_few_are_looked_at(
    native_wins: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """By the clock: one that comes late is looked at, however fast those before it came."""
    weight, seen, clock = torch.nn.Parameter(torch.zeros(2)), [], SimpleNamespace(now=0.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    clock.perf_counter = lambda: clock.now

    def turn() -> None:
        float((weight.detach() * 2).sum()) if kind == "read" else optimizer.step()

    with fused_eager(native="measured"):
        door = current_door()
        assert door is not None
        while not door.bypassed:
            turn()
        assert door.policy.alone.turns.kind == kind
        look = door.turned_bypassed

        def turned_bypassed(turn: Any) -> None:
            seen.append(1 + door.unseen[turn])
            look(turn)

        door.begin_bypass(door.policy.alone.turns.kind, 1.0)
        monkeypatch.setattr("fused_eager.frontends.context.bypass.GLANCE", 1.0)
        monkeypatch.setattr("fused_eager.frontends.context.bypass.time", clock)
        monkeypatch.setattr("fused_eager.frontends.context.readers.perf_counter", clock.perf_counter)
        monkeypatch.setattr(door, "turned_bypassed", turned_bypassed)
        door.policy.alone.until = 1e9
        for late in [0.125] * (LOOKED_AT + 24) + [2.0]:
            clock.now += late
            turn()
        assert door.bypassed
    assert seen == [1] * LOOKED_AT + [8, 8, 8, 1]


def test_reads_are_no_turn_where_nothing_is_to_be_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: Segment) -> bool:
        self.chosen, self.until = False, math.inf
        return False

    monkeypatch.setattr(Segment, "_choose", choose)
    monkeypatch.setattr(Segment, "_tells", lambda self: True)
    x = torch.ones(2, 4)
    with fused_eager(native="measured"):
        assert not any(turns((x * 2).sum().item, 8 * READS))


def test_nothing_changes_inside_of_a_backward_pass(native_wins_for_long: None) -> None:
    """Torch restores a thread's modes when a node of the graph is done: what came or went in it would be forgotten."""
    seen = []

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            door = current_door()
            before = door.bypassed  # type: ignore[union-attr]
            for _ in range(8 * READS):
                assert float((gradient * 2).sum()) == 12.0
            seen.append(before)
            assert door.bypassed is before  # type: ignore[union-attr]
            return gradient * 2

    x = torch.ones(6, requires_grad=True)

    def step() -> None:
        x.grad = None
        Reading.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad.tolist() == [2.0] * 6  # type: ignore[union-attr]

    with fused_eager(native="measured"):
        bypassed = turns(step, 60)
    assert any(bypassed) and {True, False} == set(seen)


def test_a_loop_of_which_a_part_is_faster_fused_stays_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two segments in a turn one was found faster natively, the other fused."""
    x = torch.arange(6.0)

    def step() -> None:
        (x * 2).sum().item()
        (x + 2).sum()
        sync()

    monkeypatch.setattr(Segment, "_choose", _choose_by_op)
    monkeypatch.setattr(Segment, "_tells", lambda self: True)
    with fused_eager(native="measured"):
        bypassed = turns(step, 60)
    chosen = {s.chosen for s in autotuner.SEGMENTS.values()}
    assert {True, False} <= chosen
    assert not any(bypassed)


def _choose_by_op(segment: Segment) -> bool:
    first = next(key for key, value in autotuner.SEGMENTS.items() if value is segment)[2]
    segment.chosen, segment.until = first[0] == id(torch.ops.aten.mul.Tensor), math.inf
    return bool(segment.chosen)


def test_the_report_counts_what_happens_without_it(native_wins: None) -> None:
    step = trainer(True)
    with fused_eager(native="measured"):
        report(reset=True)
        bypassed = sum(turns(step, 60))
    facts = report().facts
    # The step at whose end it leaves has run with it.
    assert facts.turns >= bypassed - 1 > 0 and facts.turns < facts.steps <= 60
    assert 0 < facts.bypassed < facts.seconds
    assert facts.host + facts.launch + facts.wait + facts.bypassed <= facts.seconds * 1.01
    # The text names every share above half a percent; how large this one is depends on the machine.
    facts.bypassed = facts.seconds / 2
    assert "torch alone" in facts_lines(facts)[0]
