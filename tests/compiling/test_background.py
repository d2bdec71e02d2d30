"""Compiling in the background: what comes once is not compiled, what comes again is, and nobody waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fused_eager import fused_eager, report, sync
from fused_eager.compiling import background, compile
from fused_eager.executing import load
from fused_eager.log.events import LOG
from fused_eager.policy.hotness import PATIENCE, VARIANTS
from fused_eager.reporting.expecting import expect
from tests.streams import events, stable_shapes


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    background.wait()
    with stable_shapes():
        background.FORMS.clear()
        yield
        background.wait()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While this is not set, the compiler takes its time."""
    release, build = threading.Event(), compile.build

    def slow(*args: Any) -> Any:
        assert release.wait(60)
        return build(*args)

    monkeypatch.setattr(compile, "build", slow)
    yield release
    release.set()
    background.wait()


def make_step(seed: int) -> Callable[[], float]:
    """A step whose shapes no other test has: numbers would be inputs of the same regions."""

    def step() -> float:
        x = torch.arange(100.0 + seed) / 64
        return float((x.sin() + 2).square().sum())

    return step


def compilations(step: Callable[[], Any], times: int) -> list[int]:
    """How many had been told after each round, everything that was asked for being compiled."""
    out = []
    with events("compile") as seen, fused_eager(compile="auto"):
        for _ in range(times):
            step()
            background.wait()
            out.append(len(seen))
    return out


def test_what_comes_once_is_not_compiled() -> None:
    assert compilations(make_step(1), 1) == [0]


def test_what_comes_again_is_compiled_and_then_no_more() -> None:
    counts = compilations(make_step(2), 6)
    assert counts[0] == 0 and counts[1] > 0 and counts[1:] == [counts[1]] * 5


def test_the_compiled_stream_runs() -> None:
    step = make_step(3)
    plain = step()
    with events("plan", "flush") as seen, fused_eager(compile="auto"):
        for _ in range(4):
            assert step() == pytest.approx(plain, rel=1e-5)
            background.wait()
    hows = {e.data["plan"]: {r["how"] for r in e.data["regions"]} for e in seen if e.kind == "plan"}
    ways = [hows[e.data["plan"]] for e in seen if e.kind == "flush"]
    assert ways[0] == {"aten"} and ways[-1] == {"xla"}


def test_nobody_waits_for_the_compiler(held: threading.Event) -> None:
    step = make_step(4)
    plain = step()
    with fused_eager(compile="auto"):
        values = [step() for _ in range(20)]
        assert background.busy(), "the compiler was never asked, so nothing was tested"
    assert values == [plain] * 20


def test_a_thread_that_waits_for_nothing_records_nothing(held: threading.Event) -> None:
    step = make_step(5)
    with events("flush") as seen, fused_eager(compile="auto"):
        for _ in range(3 * background.MEETINGS):
            step()
        recorded = len(seen)
        held.set()
        background.wait()
        for _ in range(3):
            step()
    assert recorded <= background.MEETINGS + 3, "what runs natively until the compiler is done is not recorded"
    assert len(seen) >= recorded + 2, "and once it is done recording goes on"


def test_where_nobody_reads_the_log_less_is_recorded(held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(step: Callable[[], float]) -> int:
        before = LOG.counts["flush"]
        for _ in range(3 * background.MEETINGS):
            step()
        return LOG.counts["flush"] - before

    with fused_eager(compile="auto"):
        assert recorded(make_step(15)) <= background.UNHEARD + 3
        held.set()
        background.wait()
        held.clear()
        sync()  # where it goes on
        monkeypatch.setattr(LOG, "asked", True)
        assert background.MEETINGS < recorded(make_step(16)) <= background.MEETINGS + 3


def test_streams_that_are_there_rest_too_while_another_one_is_compiled(held: threading.Event) -> None:
    """What they take then says nothing, and the compiler is in their way at each turn."""
    known, other = make_step(77), make_step(78)
    held.set()
    with fused_eager(compile="auto", native="measured"):
        known(), known()
        background.wait()
        held.clear()
        other(), other(), other()  # of another length: it is written down when it comes again
        assert background.busy()
        with events("flush") as seen:
            for _ in range(4 * background.MEETINGS):
                known()
        assert 0 < len(seen) <= background.MEETINGS
        held.set()
        background.wait()
        with events("flush") as seen:
            for _ in range(3):
                known()
        assert seen, "and once it is done recording goes on"


def test_a_loop_without_sync_points_goes_on_recording(held: threading.Event) -> None:
    with fused_eager(compile="auto", max_pending=4), events("flush") as seen:
        x = torch.ones(8)
        for _ in range(4 * background.MEETINGS):
            x = x * 1.25 - 0.25
        many = len(seen)
        assert many < 2 * background.MEETINGS, "it rests"
        held.set()
        background.wait()
        for _ in range(40):
            x = x * 1.25 - 0.25
        assert len(seen) > many
        assert x.tolist() == [1.0] * 8


@pytest.mark.parametrize(("seed", "theirs"), [(90, None), (91, 1e-5), (92, 0.003)])
def test_the_compiler_lets_the_program_have_pythons_lock(
    held: threading.Event, seed: int, theirs: float | None
) -> None:
    """`theirs` is what the program sets meanwhile, which stands."""
    before, step = sys.getswitchinterval(), make_step(seed)
    try:
        with fused_eager(compile="auto"):
            step(), step()
            limit = time.monotonic() + 60
            while sys.getswitchinterval() != pytest.approx(background.YIELD):
                assert background.busy() and time.monotonic() < limit
            if theirs:
                sys.setswitchinterval(theirs)
            held.set()
            background.wait()
        assert sys.getswitchinterval() == pytest.approx(theirs or before)
    finally:
        sys.setswitchinterval(before)


def test_streams_that_come_once_each_stop_being_recorded() -> None:
    """A growing shape: nothing of it ever comes again, so nothing is compiled, and soon nothing recorded."""
    with events("compile") as seen, events("flush") as flushes, fused_eager(compile="auto"):
        for n in range(3, 60):
            x = torch.arange(float(n))
            assert ((x * 3 + 1).sqrt() - 7).square().sum().item() > 0
        background.wait()
    assert not seen
    assert len(flushes) < 6 * (VARIANTS + PATIENCE)


def test_what_failed_in_the_background_is_told_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("a fault of planning")

    monkeypatch.setattr(load.plan, "validate", broken)
    step = make_step(6)
    with fused_eager(compile="auto"):
        step(), step()
        background.wait()
        with pytest.raises(ZeroDivisionError, match="a fault of planning"):
            step()


def test_a_region_that_xla_refuses_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(compile, "build", refused)
    step = make_step(7)
    plain = step()
    with events("compile-failed") as told, fused_eager(compile="auto"):
        for _ in range(5):
            assert step() == plain
            background.wait()
    assert [e.data["error"] for e in told][:1] == ["RuntimeError: no room"]


def test_switches_are_those_of_the_stream_and_not_those_of_later(held: threading.Event) -> None:
    from fused_eager.fusion_rules import precision

    seen: list[str] = []
    inner = compile.build

    def noted(*args: Any) -> Any:
        seen.append(dict(precision.switches())["float32_matmul_precision"])
        return inner(*args)

    compile.build = noted
    try:
        with fused_eager(compile="auto"):
            for _ in range(2):
                (torch.ones(5, 3) @ torch.ones(3, 5)).sum().item()
            torch.set_float32_matmul_precision("medium")
            held.set()
            background.wait()
    finally:
        compile.build = inner
        torch.set_float32_matmul_precision("highest")
    assert seen and set(seen) == {"highest"}


@pytest.mark.parametrize("option", [{"verify": 1.0}, {"islands": "warn"}, {"compile": "blocking"}], ids=str)
def test_who_wants_to_see_compiled_regions_waits_for_them(option: dict[str, Any]) -> None:
    step = make_step(20 + len(str(option)))
    with events("compile") as seen, fused_eager(**{"compile": "auto", **option}):
        step()
        assert seen


def test_sync_waits_for_the_compiler_if_asked_to() -> None:
    with fused_eager(compile="auto"):
        step = make_step(8)
        step(), step()
        sync(compiled=True)
        assert not background.busy()


def test_a_budget_counts_what_its_body_asked_for(held: threading.Event) -> None:
    step = make_step(9)
    threading.Timer(0.3, held.set).start()
    with fused_eager(compile="auto"):
        step(), step()
        with expect(max_compiles=0):
            step(), step()


def test_the_report_tells_waiting_from_working() -> None:
    LOG.clear()
    step = make_step(10)
    with fused_eager(compile="auto"):
        for _ in range(3):
            step()
            background.wait()
    found = report().facts
    assert found.behind > 0 and found.compile == 0
    assert "while the program went on" in str(report())


def test_a_process_ends_soon_and_cleanly() -> None:
    """The queue is dropped; what XLA is doing is waited for, because a process that ends under it would crash."""
    program = """
import torch
from fused_eager import fused_eager
from fused_eager.compiling import background, compile
begun, build = [], compile.build
def slow(*args):
    begun.append(1)
    import time
    time.sleep(0.5)
    return build(*args)
compile.build = slow
with fused_eager():
    for n in range(2, 12):
        for _ in range(2):
            ((torch.ones(n) * 2).tan() + n).sum().item()
print("queued", background.busy(), flush=True)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_COMPILE")}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "queued True\n"
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr
    assert time.perf_counter() - began < 60


def test_a_forked_child_compiles_nothing(held: threading.Event) -> None:
    step = make_step(11)
    plain = step()
    with fused_eager(compile="auto"):
        step(), step()
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if step() == plain and not background.busy() else 1)
            finally:
                os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
