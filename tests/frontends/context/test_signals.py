"""Signals: handlers of the program's run between its own lines, never in the middle of the runtime."""

from __future__ import annotations

import gc
import io
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch

from fused_eager import fused_eager, sync
from fused_eager.commands import launch
from fused_eager.compiling import compile as compiling
from fused_eager.executing import materialize, run
from fused_eager.frontends.context import context, guards, readers, signals

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system cannot send one to a thread")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those that were there come back, whatever a test does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    assert signal.signal is signals._set and signal.getsignal is signals._get


def until(condition: Callable[[], bool]) -> None:
    """Be the program, which does nothing."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def interrupted_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, log: list[str]) -> None:
    """Have the signal come when a function of the runtime's is done, once."""
    original, done = getattr(owner, name), []

    def with_signal(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if not done:
            done.append(True)
            log.append("came")
            signal.raise_signal(number)
            log.append("went on")
        return out

    monkeypatch.setattr(owner, name, with_signal)


def test_a_handler_waits_for_the_end_of_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    saved: list[Any] = []

    def save(number: int, frame: object) -> None:
        file = io.BytesIO()
        torch.save(x, file)
        saved.append(torch.load(io.BytesIO(file.getvalue())).tolist())
        log.append("handled")

    signal.signal(signal.SIGUSR1, save)
    interrupted_in(monkeypatch, run, "_prepare", signal.SIGUSR1, log)
    with fused_eager():
        x = torch.ones(4) * 2
        x.add_(1)
        assert (x + 1).tolist() == [4.0] * 4
        until(lambda: bool(saved))
    assert log == ["came", "went on", "handled"] and saved == [[3.0] * 4]


def test_ctrl_c_leaves_what_a_region_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    w = torch.ones(4096)
    with fused_eager(native="never"):
        for _ in range(3):
            w.mul_(0.5)
            sync()
        w.mul_(0.5)
        float(w[0])  # from here on it is on the device, and its memory is reused by what replaces it
        interrupted_in(monkeypatch, run.Execution, "_xla", signal.SIGINT, log)
        with pytest.raises(KeyboardInterrupt):
            w.mul_(0.5)
            float(w[0])
            until(lambda: False)
        assert log == ["came", "went on"]
        w.add_(1)
    assert w.tolist() == [1 + 0.5**5] * 4096


def test_ctrl_c_as_a_context_is_left_finishes_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    interrupted_in(monkeypatch, materialize, "flush", signal.SIGINT, log)
    with pytest.raises(KeyboardInterrupt):
        with fused_eager():
            x, y = torch.ones(4) * 2, torch.ones(4) * 3
        log.append("too late")
    assert log == ["came", "went on"] and (x + y).tolist() == [5.0] * 4
    time.sleep(3 * signals.LONGEST)  # and no second time
    with fused_eager():
        assert (x * y).tolist() == [6.0] * 4


def test_ctrl_c_interrupts_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    interrupted_in(monkeypatch, compiling, "build", signal.SIGINT, log)
    with fused_eager():
        x = torch.ones(3, 5) * 2.25
        with pytest.raises(KeyboardInterrupt):
            (x - 1.125).tolist()
        assert log == ["came"]
        assert (x - 1.125).tolist() == [[1.125] * 5] * 3


def test_ctrl_c_interrupts_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    original = run._prepare

    def stuck(*args: Any) -> Any:
        if not log:
            log.append("stuck")
            signal.raise_signal(signal.SIGINT)
            until(lambda: False)
        return original(*args)

    monkeypatch.setattr(run, "_prepare", stuck)
    monkeypatch.setattr(signals, "PATIENCE", 0.1)
    with fused_eager():
        x = torch.ones(4) * 2
        with pytest.raises(KeyboardInterrupt):
            x.tolist()
        assert x.tolist() == [2.0] * 4


def test_a_handler_that_raises_does_so_in_the_program() -> None:
    class Enough(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Enough

    signal.signal(signal.SIGALRM, stop)
    for native in ("never", "measured"):
        for k in range(20):
            w = torch.ones(64)  # else rounds that are stopped before they add would halve it again and again
            with fused_eager(native=native, compile="auto"), pytest.raises(Enough):
                signal.setitimer(signal.ITIMER_REAL, 0.002 + k * 1e-4)
                limit = time.monotonic() + 60
                # What is raised as Python 3.13 jumps back for a condition of `while` is raised outside of the `with`.
                while True:
                    if time.monotonic() > limit or w[0] < 0:
                        break
                    w.mul_(0.5).add_(1)
            assert torch.equal(w, w[0].expand(64)) and 0.5 <= float(w[0]) <= 2.0


def _in_the_collector(comes: Callable[[], None]) -> None:
    def callback(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            comes()

    gc.callbacks.append(callback)
    gc.collect()
    gc.callbacks.remove(callback)


def _in_a_finalizer(comes: Callable[[], None]) -> None:
    class Last:
        def __del__(self) -> None:
            comes()

    Last()


def _as_a_value_goes(comes: Callable[[], None]) -> None:
    class Value: ...

    weakref.finalize(Value(), comes)


@pytest.mark.parametrize("where", [_in_the_collector, _in_a_finalizer, _as_a_value_goes])
def test_a_handler_waits_where_what_it_raises_would_be_forgotten(where: Callable[[Callable[[], None]], None]) -> None:
    came: list[str] = []

    def comes() -> None:
        signal.raise_signal(signal.SIGINT)
        came.append("went on")

    with fused_eager(), pytest.raises(KeyboardInterrupt):
        where(comes)
        until(lambda: False)
    assert came == ["went on"]


def test_the_program_sees_its_own_handlers() -> None:
    def first(number: int, frame: object) -> None: ...

    def second(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGUSR1, first)
    with fused_eager(), fused_eager(mode="strict"):
        assert signal.getsignal(signal.SIGUSR1) is first
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.signal(signal.SIGUSR1, second) is first
        assert signal.getsignal(signal.SIGUSR1) is second
        assert signal.signal(signal.SIGALRM, signal.SIG_IGN) in (signal.SIG_DFL, signal.Handlers.SIG_DFL, None)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
        with pytest.raises(ValueError):
            signal.signal(10**6, first)
        assert signal.getsignal(signal.SIGUSR1) is second
    assert signal.getsignal(signal.SIGUSR1) is second
    with pytest.raises(TypeError), fused_eager():
        signal.signal(signal.SIGUSR1, "no handler")  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGUSR1) is second


def test_contexts_of_other_threads_change_no_handler() -> None:
    seen: list[Any] = []

    def other() -> None:
        with fused_eager():
            seen.append(signal.signal is signals._set)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [True]


def test_whose_code_a_signal_finds() -> None:
    libraries = (torch.nn.functional.__file__, torch.utils._python_dispatch.__file__, jax.numpy.__file__)
    neutral = (*libraries, threading.__file__, "<frozen runpy>", guards.__file__, readers.__file__)
    assert {signals._is_ours(file) for file in neutral} == {None}
    assert signals._is_ours(context.__file__) and signals._is_ours(run.__file__)
    assert signals._is_ours(__file__) is False and signals._is_ours(pytest.__file__) is False
    assert signals._is_ours("<string>") is False and signals._is_ours(launch.__file__) is False


@pytest.mark.parametrize("who", ["python", "compiled"])
def test_a_handler_finds_what_it_would_between_two_lines(who: str) -> None:
    """Also where one comes while torch is on its way to our mode: Python of its own runs there, with autograd off."""
    x, y = torch.zeros(8), torch.zeros(8)
    calls: list[bool] = []

    def handler(number: int, frame: object) -> None:
        p = torch.ones(3, requires_grad=True)
        (p * 2).sum().backward()
        calls.append((x * 1).sum().item() >= 0 and p.grad is not None)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with fused_eager(follower=who):
            signal.setitimer(signal.ITIMER_REAL, 0.003, 0.0037)
            until = time.monotonic() + 30
            while len(calls) < 30 and time.monotonic() < until:
                for _ in range(20):
                    x.add_(1)
                    y.copy_(x * 2)
                y[0].item()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(calls) >= 30 and all(calls)
