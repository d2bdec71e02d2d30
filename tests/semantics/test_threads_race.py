"""Several threads in contexts at the same time: what one does between two bytecodes of another changes nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from fused_eager import fused_eager, sync
from fused_eager.tracing import opinfo

SECONDS = 1.0


@pytest.fixture
def switching() -> Iterator[None]:
    """The interpreter goes from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*jobs: Callable[[], object]) -> None:
    """Run each job in a thread of its own."""
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"


def together(*jobs: Callable[[], None]) -> None:
    """Run each job again and again in a thread of its own. Raises what the first that failed raised."""
    end, errors = time.monotonic() + SECONDS, []

    def repeat(job: Callable[[], None]) -> None:
        try:
            while time.monotonic() < end and not errors:
                job()
        except BaseException as error:
            errors.append(error)

    at_once(*[partial(repeat, job) for job in jobs])
    if errors:
        raise errors[0]


def count(mode: str) -> None:
    with fused_eager(mode=mode):
        w, p = torch.full((3,), 2.0), torch.ones(40_000)
        for i in range(5):
            w.add_(1)
            p.mul_(2).sub_(1)
            if i == 2:
                assert w.sum().item() == 15 and repr(w * 2) == "tensor([10., 10., 10.])"
            if i == 3:
                w.numpy()
        assert w.tolist() == [7.0] * 3 and p.sum().item() == 40_000


def start_a_thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def test_a_thread_that_starts_finishes_what_others_record(mode: str, switching: None) -> None:
    together(lambda: count(mode), lambda: count(mode), start_a_thread)


def test_a_value_may_be_read_while_its_owner_goes_on(mode: str, switching: None) -> None:
    shared = torch.zeros(4)

    def write() -> None:
        with fused_eager(mode=mode):
            for _ in range(5):
                shared.add_(1)

    def read() -> None:
        with fused_eager(mode=mode):
            values = (shared * 2).tolist()
            assert len(set(values)) == 1 and values[0] % 2 == 0
            sync()

    together(write, read, read)


def test_ops_that_two_threads_meet_for_the_first_time_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [torch.ops.aten.add_.Tensor, torch.ops.aten.mul.Tensor]
    both, original = threading.Barrier(2), opinfo._kind

    def kind(op: torch._ops.OpOverload) -> opinfo.Kind:
        both.wait(30)
        return original(op)

    monkeypatch.setattr(opinfo, "_INFO", {})
    monkeypatch.setattr(opinfo, "_kind", kind)
    at_once(*[partial(opinfo.info_of, op) for op in ops])
    first, second = map(opinfo.info_of, ops)
    assert first.number != second.number and [first.op, second.op] == ops


def test_a_new_stream_is_run_at_once_though_another_thread_has_recorded_it_meanwhile() -> None:
    turns = threading.Event(), threading.Event()
    found: list[float] = []

    def ops(pause: Callable[[], object]) -> None:
        with fused_eager(native="measured", compile="auto"):
            x = torch.ones(7, 5)
            y = x * 3
            pause()
            z = y + x
            found.append((z - 1).sum().item())

    def first() -> None:
        ops(lambda: (turns[0].set(), turns[1].wait(30)))

    def second() -> None:
        turns[0].wait(30)
        ops(lambda: None)
        turns[1].set()

    at_once(first, second)
    assert found == [105.0, 105.0]
