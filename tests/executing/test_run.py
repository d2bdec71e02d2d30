"""Running: values arrive in the right memory, failures and interrupts leave the rest valid, and nothing is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_eager import LostValue, fused_eager, sync
from fused_eager.devices.host.buffers import TABLE, buffer_of
from fused_eager.devices.host.device import Host
from fused_eager.devices.storage import storage_of
from fused_eager.executing import run
from fused_eager.executing.deferred_checks import DEFERRED
from fused_eager.tracing.stream import DeviceInput
from tests.streams import events, flush_now, forget_pending, open_stream, passing_for_aten, stable_shapes


@torch.library.custom_op("run_test::fail", mutates_args=())
def fail(x: torch.Tensor) -> torch.Tensor:
    if x.sum() < 0:
        raise ValueError("this failed")
    return x + 1


@fail.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def known() -> torch.Tensor:
    """Forty ones, after an op without lowering has been seen to keep what it promises of them: it is deferred now."""
    x = torch.ones(40)
    fail(x)
    return x


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Compile at first sight; defer what may fail; a failed test fails no other."""
    with stable_shapes(), passing_for_aten(torch.ops.run_test.fail.default):
        yield
    forget_pending()
    DEFERRED.runs.clear()


# ---- memory --------------------------------------------------------------------------------------------------------


def test_values_swap_into_new_tensors_and_are_copied_into_old_ones() -> None:
    x = torch.ones(64)
    address = x.data_ptr()
    with fused_eager():
        y = x * 2
        x.add_(5)
        allocated = y.data_ptr()
    assert x.data_ptr() == address and x.tolist() == [6.0] * 64
    assert y.data_ptr() == allocated and y.tolist() == [2.0] * 64


def test_a_dying_value_is_donated() -> None:
    with fused_eager():
        a = torch.ones(4096) * 3
        flush_now()
        old = buffer_of(a).array  # type: ignore[union-attr]
        a.mul_(2)
        flush_now()
        assert old.is_deleted()  # type: ignore[union-attr]
        assert a.eq(6).all()


def test_a_value_that_is_still_seen_is_not_donated() -> None:
    with fused_eager():
        a = torch.ones(4096) * 3
        flush_now()
        b = a + 1
        flush_now()
        assert a.eq(3).all() and b.eq(4).all()


def test_memory_that_somebody_else_holds_is_not_written_through_donation() -> None:
    with fused_eager():
        a = torch.ones(4096) * 3
        b = a.clone()
        flush_now()
        c = a.clone()
        a.mul_(2)
        flush_now()
        a.mul_(2)
        assert (a[0].item(), b[0].item(), c[0].item()) == (12.0, 3.0, 3.0)


def test_dead_values_are_not_outputs() -> None:
    with fused_eager(), events("compile") as seen:
        y = ((torch.empty(77) * 2).exp() + 1).log()
        flush_now()
        del y
    assert [e.data["outputs"] for e in seen] == [1]


def test_a_dead_tensor_over_native_memory_is_not_an_output() -> None:
    with fused_eager(), events("compile") as seen:
        noise = torch.empty(79)
        y = noise.fill_(2).exp()
        del noise
        flush_now()
        del y
    assert [e.data["outputs"] for e in seen] == [1]


def test_what_nobody_sees_is_not_run() -> None:
    with fused_eager(), events("compile") as seen:
        y = torch.empty(78).fill_(1) * 2
        del y
    assert not seen


@pytest.mark.parametrize("flushed", [False, True])
def test_storages_are_released_with_their_tensors(flushed: bool) -> None:
    with fused_eager():
        y = torch.ones(512) * 2
        ref = weakref.ref(storage_of(y))
        if flushed:
            flush_now()
        del y
        flush_now()
        z = torch.ones(8) + 1
        flush_now()
        gc.collect()
        assert ref() is None
        del z


def test_arrays_of_dead_tensors_are_released() -> None:
    ids, table = torch.arange(10), torch.ones(100, 16)
    with fused_eager():
        arrays = []
        for _ in range(12):
            y = torch.nn.functional.embedding(ids, table)
            flush_now()
            arrays.append(weakref.ref(buffer_of(y).array))  # type: ignore[union-attr]
            del y
        gc.collect()
        alive = sum(a() is not None for a in arrays)
    assert alive <= 3, f"the values of {alive} dead tensors are kept"


def training(embedding: bool, optimizer: bool, reads: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    table = torch.nn.Embedding(20, 8) if embedding else torch.nn.Linear(8, 8)
    head = torch.nn.Linear(8, 4)
    params = [*table.parameters(), *head.parameters()]
    opt = torch.optim.Adam(params, lr=1e-3)
    data = torch.arange(12) if embedding else torch.randn(12, 8)

    def step() -> None:
        if optimizer:
            opt.zero_grad()
        loss = head(table(data)).square().mean()
        loss.backward()
        if optimizer:
            opt.step()
        if reads:
            loss.item()

    return step


LOOPS = [(True, False, False), (False, True, False), (True, True, True)]


@pytest.mark.parametrize(("embedding", "optimizer", "reads"), LOOPS)
def test_nothing_grows_in_a_long_loop(embedding: bool, optimizer: bool, reads: bool) -> None:
    with fused_eager():
        step = training(embedding, optimizer, reads)
        lost = len(TABLE)  # what the failures of other tests keep alive
        sizes = []
        for i in range(200):
            step()
            if i >= 20:
                counts = len(DEFERRED.runs), len(DEFERRED.launches), len(open_stream().pending)
                sizes.append((len(TABLE) - lost, *counts))
    names = ("TABLE", "DEFERRED.runs", "DEFERRED.launches", "pending")
    for name, column in zip(names, zip(*sizes, strict=True), strict=True):
        assert max(column) <= 40, f"{name} grew to {max(column)}"


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_failure_loses_only_what_depends_on_it() -> None:
    with fused_eager():
        x = known()
        a = x * 2
        island = fail(x)
        from_island = island * 2
        bad = fail(-x)
        worse = bad + 1
        assert torch.ops.run_test.fail.default in [n.op for n in open_stream().nodes], "it waits"
        with pytest.raises(ValueError, match="this failed"):
            bad.tolist()
        assert a.tolist() == [2.0] * 40
        assert island.tolist() == [2.0] * 40
        assert from_island.tolist() == [4.0] * 40
        for lost in (bad, worse):
            with pytest.raises(LostValue, match="this failed") as told:
                lost.tolist()
            assert isinstance(told.value.__cause__, ValueError)
        assert (x + 1).tolist() == [2.0] * 40


def test_a_failure_at_the_exit_leaves_the_others_readable() -> None:
    with pytest.raises(ValueError, match="this failed"), fused_eager():
        x = known()
        a = x * 2
        bad = fail(-x)
        assert torch.ops.run_test.fail.default in [n.op for n in open_stream().nodes], "it waits"
    assert a.tolist() == [2.0] * 40 and x.tolist() == [1.0] * 40
    with pytest.raises(RuntimeError):
        bad.tolist()
    with fused_eager():
        b = a + x
    assert b.tolist() == [3.0] * 40


def test_a_check_that_fails_at_the_exit_leaves_the_others_readable() -> None:
    table, x = torch.ones(10, 4), torch.ones(40)
    with pytest.raises(IndexError), fused_eager():
        a = x * 2
        bad = torch.nn.functional.embedding(torch.tensor([1, 2, 30]), table)
    assert a.tolist() == [2.0] * 40
    del bad


def test_the_body_s_own_exception_wins_and_the_work_is_finished() -> None:
    x = torch.ones(40)
    with pytest.raises(ZeroDivisionError), fused_eager():
        y = x * 2
        raise ZeroDivisionError
    assert y.tolist() == [2.0] * 40


def test_a_lost_tensor_can_be_given_a_new_value() -> None:
    with fused_eager():
        r = fail(-known())
        with pytest.raises(ValueError, match="this failed"):
            r.tolist()
        r.copy_(torch.ones(40))
        assert r.tolist() == [1.0] * 40


def test_the_compiler_s_failure_is_not_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_eager.compiling import compile as compiling

    def refuse(*args: Any) -> Any:
        raise RuntimeError("UNIMPLEMENTED: the compiler cannot do this")

    x = torch.full((41,), 0.5)
    with fused_eager():
        y = x.sinh() * 2
        with monkeypatch.context() as m:
            m.setattr(compiling, "build", refuse)
            assert torch.allclose(torch.tensor(y.tolist()), x.sinh() * 2)


# ---- interrupts ----------------------------------------------------------------------------------------------------

POINTS = {
    "before a region": (run.Execution, "_xla", "before"),
    "between a region's start and its results": (run.Execution, "_xla", "within"),
    "after a region": (run.Execution, "_xla", "after"),
    "while planning": (run, "_prepare", "before"),
    "while values are assigned": (run, "_assign", "before"),
    "after values were assigned": (run, "_assign", "after"),
    "while an argument is made": (Host, "numbers", "before"),
}
# The region has consumed the memory that it was given, so it cannot run again; what it made may have been lost.
MAY_LOSE = ("between a region's start and its results", "after a region")


@pytest.mark.parametrize("name", POINTS)
def test_an_interrupt_is_resumed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, when = POINTS[name]
    original = getattr(owner, attribute)

    def interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
        def then_raise(*args: Any, **kwargs: Any) -> Any:
            call(*args, **kwargs)
            raise KeyboardInterrupt

        return then_raise

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        if when == "within":
            execution, region, executable = args
            original(execution, region, replace(executable, call=interrupted(executable.call)))
        elif when == "after":
            original(*args, **kwargs)
        raise KeyboardInterrupt

    x = torch.ones(4096)
    with fused_eager():
        a, other = x * 3, x + 7
        flush_now()
        b = a * 5
        a.mul_(2)
        with monkeypatch.context() as m:
            m.setattr(owner, attribute, interrupting)
            with pytest.raises(KeyboardInterrupt):
                flush_now()
        resumed = True
        try:
            x + 0  # the next op, whatever it works on, takes up what was interrupted
        except RuntimeError as error:
            assert name in MAY_LOSE and "interrupt" in str(error)
            resumed = False
        for t, value in ((a, 6.0), (b, 15.0)):
            try:
                assert t.tolist() == [value] * 4096
            except LostValue as error:
                assert not resumed and "interrupt" in str(error), "a loss is told when it is found, too"
        assert other.eq(8).all() and x.eq(1).all()
        a.copy_(x)
    assert a.eq(1).all() and other.eq(8).all() and x.eq(1).all()
    assert not resumed or b.eq(15).all()
    with fused_eager():
        c = (other * 2).add_(a)
    assert c.eq(17).all()


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_changing_numbers_are_data() -> None:
    x = torch.ones(33)
    with fused_eager():
        found = []
        with events("compile") as seen:
            for i in range(6):
                found.append(float(((x * (i + 0.5)).add_(i) / 4).sum()))
    assert found == [33 * ((i + 0.5) + i) / 4 for i in range(6)]
    assert len(seen) <= 2


def test_what_a_region_that_still_runs_reads_is_not_written() -> None:
    """It was handed over by a region of the same flush, so no input of it tells."""
    x, m = torch.rand(500, 500), torch.rand(500, 500) / 500

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        early, late = x + 1, m
        for _ in range(8):
            late = (late @ m).tanh()
        return early, late + early

    expected = program()[1]
    with fused_eager(compile="wait", max_region=2):
        for _ in range(2):
            early, late = program()
            early.numpy()[:] = 0
            torch.testing.assert_close(late, expected)


def test_inputs_left_on_the_device_stay_there() -> None:
    with fused_eager():
        y = torch.ones(33) * 2
        flush_now()
        z = y + 1
        assert all(isinstance(i, DeviceInput) for i in open_stream().inputs)
        assert z.tolist() == [3.0] * 33
        assert y.tolist() == [2.0] * 33


def test_sync_finishes_everything() -> None:
    with fused_eager():
        kept = [torch.ones(8) * i for i in range(5)]
        sync()
        assert not open_stream().nodes and all(buffer_of(t) is None for t in kept)
        assert not DEFERRED.launches and not DEFERRED.runs
    assert run.DEFERRED is DEFERRED
