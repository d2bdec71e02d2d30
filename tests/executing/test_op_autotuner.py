"""Contests: heavy calls are measured alone, in ATen and in XLA, and those that ATen runs faster are islands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_eager import fused_eager, report
from fused_eager.compiling import background
from fused_eager.compiling.compile import Settings
from fused_eager.compiling.key import Computation
from fused_eager.executing import op_autotuner
from fused_eager.executing.op_autotuner import islands
from fused_eager.policy import autotuner
from fused_eager.policy.segment import Choice
from fused_eager.tracing.stream import Node
from tests.compiling.test_caching import finish_writing, own_process
from tests.streams import all_results_large, aten, events, node, recorded

__all__ = ["own_process"]  # the fixture that keeps each test's caches apart

N = 1 << 16
FASTER, SLOWER = Choice(True, 2.0, 1.0), Choice(False, 1.0, 1.0)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    autotuner.forget()
    op_autotuner.forget()
    yield
    op_autotuner.forget()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that are measured from now on; ATen wins each time."""
    found: list[str] = []

    def measured(call: Computation, settings: Settings) -> Choice:
        found.append(str(call.chosen[0].op))
        return FASTER

    monkeypatch.setattr(op_autotuner, "_measured", measured)
    return found


def program(x: torch.Tensor) -> torch.Tensor:
    values, _ = torch.sort(torch.tanh(x) * 2)
    return torch.exp(values) + values


def steady(program: Callable[..., torch.Tensor], *args: Any, rounds: int = 4, **options: Any) -> torch.Tensor:
    """What a program returns once what it wanted compiled is compiled."""
    with fused_eager(**{"cache": "off", "compile": "auto", "native": "measured", **options}):
        for _ in range(rounds):
            out = program(*args)
            total = out.sum().item()
            background.wait()
    assert total == pytest.approx(float(out.sum()))
    return out


def chosen(seen: list[Any]) -> list[list[str]]:
    """How the regions of each plan ran."""
    return [[r["how"] for r in e.data["regions"]] for e in seen if e.kind == "plan"]


# ---- in the plan -----------------------------------------------------------------------------------------------------


def test_a_call_that_aten_runs_faster_is_an_island_between_two_regions(asked: list[str]) -> None:
    x = torch.randn(N)
    with events("plan", "op-choice") as seen:
        out = steady(program, x)
    torch.testing.assert_close(out, program(x))
    assert asked == ["aten.sort.default"]
    (told,) = [e.data for e in seen if e.kind == "op-choice"]
    assert told["native"] and told["site"].partition(":")[0].endswith("test_op_autotuner.py") and not told["remembered"]
    assert ["xla", "aten", "xla"] in chosen(seen)
    assert any("ATen is faster here" in str(e.data) for e in seen)
    assert "aten.sort.default at" in str(report())


def test_a_call_that_xla_runs_as_fast_stays_in_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_autotuner, "_measured", lambda call, settings: SLOWER)
    with events("plan", "op-choice") as seen:
        steady(program, torch.randn(N))
    assert [e.data["native"] for e in seen if e.kind == "op-choice"] == [False]
    assert chosen(seen)[-1] == ["xla"]


def test_what_cannot_be_measured_stays_with_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no such client")

    monkeypatch.setattr(op_autotuner, "_client", fail)
    with events("plan", "op-choice") as seen:
        out = steady(program, x := torch.randn(N))
    torch.testing.assert_close(out, program(x))
    assert chosen(seen)[-1] == ["xla"] and not [e for e in seen if e.kind == "op-choice"]


def test_each_call_is_measured_once(asked: list[str]) -> None:
    steady(lambda x: program(program(x)), torch.randn(N))
    steady(program, torch.randn(N))
    assert asked == ["aten.sort.default"]
    steady(program, torch.randn(2 * N))
    assert len(asked) == 2, "other shapes are another call"


@pytest.mark.parametrize(
    "options",
    [{"compile": "blocking"}, {"compile": "wait"}, {"native": "never"}, {"mode": "strict"}, {"verify": 1.0}],
    ids=str,
)
def test_nothing_is_measured_where_the_program_says_who_runs_it(options: dict[str, Any], asked: list[str]) -> None:
    steady(program, torch.randn(N), **options)
    assert asked == []


def small(x: torch.Tensor) -> torch.Tensor:
    return program(x[:100])


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.index_add_(0, torch.arange(4), x[:4]) + 1


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x).sum(0, keepdim=True)


def unread(x: torch.Tensor) -> torch.Tensor:
    torch.sort(x)
    return x + 1


@pytest.mark.parametrize("program", [small, in_place, pointwise, unread])
def test_what_is_not_worth_it_is_not_measured(program: Callable[..., torch.Tensor], asked: list[str]) -> None:
    steady(program, torch.randn(N))
    assert asked == []


def test_another_process_finds_what_was_measured(asked: list[str], tmp_path: Path) -> None:
    options = {"cache": "", "cache_dir": str(tmp_path)}
    steady(program, torch.randn(N), **options)
    finish_writing()
    autotuner.forget()
    op_autotuner.forget()
    with events("op-choice") as seen:
        steady(lambda x: program(x) * 3, torch.randn(N), **options)
    assert len(asked) == 1 and [e.data["remembered"] for e in seen] == [True]


# ---- measuring -------------------------------------------------------------------------------------------------------


def call_of(function: Callable[..., Any], *args: torch.Tensor) -> Computation:
    """The one node that a function records, as a contest takes it."""
    call = recorded(lambda: function(*args))
    assert len(call.nodes) == 1
    return call


CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "sort": (lambda x: torch.sort(x)[0], (torch.randn(1 << 12),)),
    "a number": (lambda x: torch.addmm(x, x, x, alpha=0.5), (torch.randn(32, 32),)),
    "half": (lambda x: x @ x, (torch.randn(32, 32).bfloat16(),)),
    "an index": (lambda x, i: torch.index_add(x, 0, i, x), (torch.randn(32, 8), torch.arange(32))),
    "images": (lambda x, w: torch.conv2d(x, w), (torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3))),
    "complex": (lambda x: torch.fft.fft(x), (torch.randn(64, dtype=torch.complex64),)),
}


@pytest.mark.parametrize("results", [nullcontext, all_results_large], ids=["new", "in the last ones"])
@pytest.mark.parametrize("name", CALLS)
def test_both_are_measured(name: str, results: Callable[[], AbstractContextManager[None]]) -> None:
    """Whether results are in new memory or, as large ones, in that of the run before."""
    function, args = CALLS[name]
    with results():
        choice = op_autotuner._measured(call_of(function, *args), Settings())
    assert choice is not None and choice.fused_s > 0 and choice.native_s > 0
    assert choice.native == (choice.fused_s > op_autotuner.AHEAD * choice.native_s + op_autotuner.CUT)


def test_the_program_draws_the_numbers_that_it_would_have_drawn() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    op_autotuner._measured(call_of(CALLS["sort"][0], *CALLS["sort"][1]), Settings())
    assert torch.equal(torch.get_rng_state(), before)


def test_time_of_other_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_autotuner.cores, "threads", lambda: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        clock = op_autotuner._clock(())
        own = op_autotuner._clock([threading.get_native_id()])
        began, slept = clock(), own()
        time.sleep(0.05)
        assert clock() - began < 0.04 and own() - slept < 0.04
        list(range(1 << 20))
        # The thread that is named counts beside the one that calls; here they are one.
        assert own() - slept > 1.5 * (clock() - began) > 0
    finally:
        torch.set_num_threads(threads)


def test_a_node_without_a_rule_is_none_of_it(asked: list[str]) -> None:
    home = (torch.float32, (1 << 20,))
    nodes: list[Node] = [node(1, [0], aten.unsafe_chunk.default, home=home), node(2, [1], aten.sort.default, home=home)]
    found = islands(nodes, frozenset([2]), {0: home, 1: home, 2: home}, Settings())
    assert list(found) == [1] and asked == ["aten.sort.default"]
