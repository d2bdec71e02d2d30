"""Shadowing: a stream that has not come before is run at once, as in eager, and is followed when it comes again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fused_eager import fused_eager, sync
from fused_eager.compiling import background
from fused_eager.devices.host.buffers import buffer_of
from fused_eager.devices.host.trap import is_armed
from fused_eager.devices.storage import storage_of
from fused_eager.executing import island, load
from fused_eager.recording import record
from fused_eager.tracing import calls, trace
from tests.recording.test_follow import counted
from tests.streams import events, forget_shapes, open_stream


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    background.wait()
    forget_shapes()
    background.FORMS.clear()
    trace.MEMORY.forget()
    yield
    background.wait()


def auto() -> fused_eager:
    return fused_eager(compile="auto", native="measured")


def test_a_first_stream_has_its_values_at_once() -> None:
    x = torch.arange(64.0)
    with auto():
        y = x * 2 + 1
        assert open_stream().shadowed and len(open_stream().nodes) == 2
        assert not is_armed(storage_of(y))
        with torch._C._DisableTorchDispatch():
            assert torch.equal(y, torch.arange(64.0) * 2 + 1)
        sync()
        assert buffer_of(y) is None and not open_stream().nodes


def test_nothing_is_run_a_second_time_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island, "run_node", lambda *a: pytest.fail("a shadowed op was run again"))
    with events("flush", "plan") as seen, auto():
        float((torch.arange(30.0) + 1).sum())
    assert [e.data["reason"] for e in seen if e.kind == "flush"] == ["sync.value"]
    plan = next(e for e in seen if e.kind == "plan")
    assert [r["how"] for r in plan.data["regions"]] == ["aten"]


def training_step() -> Callable[[], float]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x, y = torch.randn(8, 12), torch.randint(0, 3, (8,))

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def test_a_training_step_is_the_same_shadowed_recorded_and_compiled() -> None:
    step = training_step()
    wanted = [step() for _ in range(12)]
    step = training_step()
    with auto():
        got = []
        for _ in range(12):
            got.append(step())
            background.wait()
    assert got[0] == wanted[0]
    assert got == pytest.approx(wanted, rel=1e-4)


def test_a_new_call_within_a_compiled_stream_begins_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is run, and nobody has to infer what it returns."""
    x = torch.randn(1237)

    def step(other: bool) -> float:
        y = (x * 2).exp()
        if other:
            y = torch.logaddexp(y, x)
        return float(y.sum())

    wanted = [step(i > 5) for i in range(9)]
    monkeypatch.setattr(record, "inference_is_loaded", lambda: False)
    monkeypatch.setattr(calls, "infer", lambda *a: pytest.fail("it was inferred"))
    got = []
    with auto():
        for i in range(9):
            stream = open_stream()
            stream.policy.autotuner.native = False
            stream.policy.backoff.end()
            got.append(step(i > 5))
            background.wait()
    assert got == pytest.approx(wanted, rel=1e-5)


def test_it_is_followed_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(40, 8), torch.randn(8)

    def step() -> float:
        y = (x * w).relu_()
        w.add_(y[3], alpha=0.01)
        z = torch.zeros(40)
        z[1:5] = y.sum(1)[1:5]
        return float(z.exp().sum())

    with fused_eager(compile="auto", native="never"):
        step()
        size = trace.MEMORY.size
        for _ in range(3):  # it is compiled, and then what was in native memory is on the device
            step()
            background.wait()
        with counted(monkeypatch) as counts:
            for _ in range(3):
                step()
    assert trace.MEMORY.size == size
    assert counts["missed"] == 0 and counts["followed"] > 0


def test_what_comes_again_is_compiled_as_if_it_had_been_recorded() -> None:
    counts = []
    x = torch.randn(300)

    with events("compile") as seen, auto():
        for _ in range(4):
            float((x.sin() + 2).square().sum())
            background.wait()
            counts.append(len(seen))
    assert counts[0] == 0 and counts[1] > 0 and counts[1:] == [counts[1]] * 3


def test_a_stream_is_shadowed_until_something_is_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "is_quick", lambda ops, seconds: False)
    compiling = threading.Event()
    make = load._compiled

    def wait_first(*args: Any) -> Any:
        compiling.wait()
        return make(*args)

    monkeypatch.setattr(load, "_compiled", wait_first)
    x, ways = torch.randn(300), []

    def step() -> float:
        y = x.sin() + 2
        ways.append(bool(open_stream().shadowed))
        return float(y.square().sum())

    wanted = step_in_eager = float((x.sin() + 2).square().sum())
    with events("flush", "plan") as seen, auto():
        got = [step() for _ in range(4)]
        compiling.set()
        background.wait()
        got += [step() for _ in range(2)]
    assert ways == [True] * 4 + [False] * 2
    assert got[:4] == [step_in_eager] * 4 and got == pytest.approx([wanted] * 6, rel=1e-5)
    how = {e.data["plan"]: {r["how"] for r in e.data["regions"]} for e in seen if e.kind == "plan"}
    ran = [how[e.data["plan"]] for e in seen if e.kind == "flush"]
    assert ran == [{"aten"}] * 4 + [{"xla"}] * 2


def test_what_is_compiled_quickly_is_waited_for_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PART", 1e9)
    x, ways = torch.randn(300), []
    with events("compile") as seen, auto():
        for _ in range(3):
            y = x.cos() + 3
            ways.append((bool(open_stream().shadowed), len(seen)))
            float(y.sum())
    assert ways == [(True, 0), (False, 0), (False, 1)]


def test_a_shadowed_stream_is_compared_with_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "came_again", lambda shapes, waiting: False)  # nothing is ever compiled
    x, w = torch.randn(40, 8), torch.randn(8)

    def step(factor: float) -> list[float]:
        y = (x * w).mul_(factor)
        z = torch.zeros(40)
        z[1:5] = y.sum(1)[1:5]
        y[2].add_(z[0] + 1)
        return [float(z.sum()), float(y.sum())]

    wanted = [step(f) for f in (2.0, 2.0, 3.0, 0.0, 5.0)]
    with auto():
        got = [step(2.0)]
        with counted(monkeypatch) as counts:
            got += [step(f) for f in (2.0, 3.0, 0.0, 5.0)]
    assert got == wanted
    assert counts["missed"] <= 1, "of what comes after a stream for the first time, the first op"
    assert counts["followed"] > 10


def test_a_shadowed_stream_leaves_its_trace_anywhere() -> None:
    x = torch.randn(30)

    def step(turn: int) -> float:
        y = x * 2
        if turn % 3 == 1:
            y = y.view(5, 6).sum(0)
        if turn % 3 == 2:
            y[3:9] = y[:6].clone()
        return float((y + turn).square().sum())

    wanted = [step(i) for i in range(9)]
    with auto():
        assert [step(i) for i in range(9)] == pytest.approx(wanted, rel=1e-5)


def test_an_op_that_raises_does_so_on_its_line_and_changes_nothing() -> None:
    x, index = torch.zeros(5), torch.tensor([1, 7])
    with auto():
        y = x + 1
        with pytest.raises(IndexError) as failed:
            y.index_select(0, index)
        assert str(failed.value) == "index out of range in self"
        with pytest.raises(RuntimeError, match="must match the size"):
            y.add_(torch.ones(4))
        z = y * 2
    assert y.tolist() == [1.0] * 5 and z.tolist() == [2.0] * 5


def test_what_dies_is_freed_before_the_stream_ends() -> None:
    made: list[weakref.ref[Any]] = []
    x = torch.zeros(1 << 18)  # 1 MB
    with auto():
        for _ in range(64):
            x = x + 1
            made.append(weakref.ref(storage_of(x)))
        gc.collect()
        assert len(open_stream().nodes) == 64
        assert sum(ref() is not None for ref in made) <= 4
    assert float(x[0]) == 64


def test_numpy_sees_a_shadowed_value_and_may_write_it() -> None:
    x = torch.arange(6.0)
    with auto():
        y = x + 1
        a = y.numpy()
        a[0] = 40
        z = y * 2
        assert z.tolist() == [80, 4, 6, 8, 10, 12]
        a[1] = 7
        y.add_(1)
        assert a.tolist() == [41, 8, 4, 5, 6, 7]


def test_another_thread_reads_and_writes_what_is_shadowed() -> None:
    x = torch.zeros(2000)
    with auto():
        y = x + 1
        assert open_stream().shadowed

        def other() -> None:
            y.mul_(3)
            seen.append(float((y + 1).sum()))

        seen: list[float] = []
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        z = y + 1
    assert seen == [8000.0] and z.sum() == 8000 and y.sum() == 6000


def test_what_an_earlier_stream_left_on_the_device_is_fetched() -> None:
    x = torch.randn(500)

    def first() -> torch.Tensor:
        return (x.exp() + 1).log_()

    with auto():
        for _ in range(4):
            y = first()
            float(y.sum())
            background.wait()
        y = first()
        float(y[0])  # of a stream that is known: y stays on the device
        z = torch.full((500,), 2.0).mul_(0.5).add_(y).erf()
        z[:10] = y[:10]
    wanted = torch.full((500,), 2.0).mul_(0.5).add_(first()).erf()
    wanted[:10] = first()[:10]
    torch.testing.assert_close(z, wanted)


def test_what_is_at_home_is_brought_to_the_device_for_a_stream_that_is_known() -> None:
    """Also after its first op, once recorded as one that may be shadowed, was interrupted."""
    x = torch.randn(64)

    def known(y: torch.Tensor) -> torch.Tensor:
        return y.tanh().mul_(3)

    with auto():
        for _ in range(3):
            known(x + 1)
            sync(compiled=True)
        with torch.no_grad():
            y = x * 0.25 + 4  # shadowed, and at home when its sum has been read
        float(y.sum())
        assert buffer_of(y) is not None and buffer_of(y).is_at_home
        with pytest.raises(RuntimeError, match="must match"):
            y.add_(torch.ones(3))
        z = known(y)
        assert not is_armed(storage_of(x))
        y.mul_(2)
        w = known(y)
    torch.testing.assert_close(y, (x * 0.25 + 4) * 2)
    torch.testing.assert_close(z, known(x * 0.25 + 4))
    torch.testing.assert_close(w, known((x * 0.25 + 4) * 2))


def test_a_value_at_home_that_dies_is_forgotten() -> None:
    with auto():
        y = torch.arange(1000.0) * 2
        float(y.sum())
        ref = weakref.ref(storage_of(y))
        del y
        sync()
        assert ref() is None


def test_draws_are_those_of_eager() -> None:
    def body() -> torch.Tensor:
        x = torch.empty(50).uniform_() + 1
        x = torch.nn.functional.dropout(x, 0.5)
        return x + torch.empty_like(x).normal_()

    torch.manual_seed(5)
    wanted = [body() for _ in range(3)]
    torch.manual_seed(5)
    with auto():
        got = [body() for _ in range(3)]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_an_interrupt_in_a_shadowed_op_leaves_everything_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_eager.recording import shadow

    x = torch.arange(10.0)
    with auto():
        y = x + 1
        plain = shadow.run_natively

        def interrupted(*args: Any) -> Any:
            plain(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(shadow, "run_natively", interrupted)
        with pytest.raises(KeyboardInterrupt):
            y.mul_(2)
        monkeypatch.setattr(shadow, "run_natively", plain)
        z = y + 1
    assert z.tolist() == (y + 1).tolist()
    assert y.tolist() == [2.0 * (i + 1) for i in range(10)]


@pytest.mark.parametrize("options", [{"compile": "wait"}, {"mode": "strict"}, {"mode": "debug"}, {"islands": "warn"}])
def test_where_the_compiler_is_waited_for_nothing_is_shadowed(options: dict[str, Any]) -> None:
    with fused_eager(**{"compile": "auto", "native": "measured", **options}):
        torch.ones(5) * 2
        assert not open_stream().shadowed
