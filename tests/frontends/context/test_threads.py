"""Threads that are lent a context: what they leave behind when they end, and which are the library's own."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from fused_eager import FusedEagerError, current_mode, fused_eager, progress
from fused_eager.devices.host.buffers import buffer_of


def old_pool() -> ThreadPoolExecutor:
    """A pool whose one thread was there before any context: what it is given runs in one for as long as that takes."""
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool


def test_the_end_of_a_job_leaves_what_others_have_made_on_the_device() -> None:
    def job(k: int) -> torch.Tensor:
        return (torch.ones(1000) * k).tanh()

    with old_pool() as pool, fused_eager(native="never"):
        w = torch.ones(1000)
        for k in range(3):
            batch = pool.submit(job, k).result()
            assert buffer_of(batch) is None  # a thread that is in no context may have it from here
            assert buffer_of(w) is not None
            w.add_(batch)
            assert float(w[0]) == pytest.approx(1 + sum(math.tanh(i) for i in range(k + 1)))
        pool.submit(lambda: w.add_(1)).result()
        assert buffer_of(w) is None
    assert torch.allclose(w, 2 + torch.tensor([0.0, 1.0, 2.0]).tanh().sum())


def test_a_job_that_outlives_the_context_leaves_nothing_on_the_device() -> None:
    began, go = threading.Event(), threading.Event()

    def job() -> torch.Tensor:
        w.add_(1)
        began.set()
        go.wait(30)
        return w

    with old_pool() as pool:
        with fused_eager(native="never"):
            w = torch.ones(1000)
            future = pool.submit(job)
            began.wait(30)
        go.set()
        assert buffer_of(future.result()) is None and float(w[0]) == 2


def test_a_thread_that_tells_of_progress_is_in_no_context() -> None:
    with fused_eager(native="never"):
        w = torch.ones(10)
        w.add_(1)
        assert float(w[0]) == 2
        with progress.waiting("a test"):
            teller = next(t for t in threading.enumerate() if t.name == "fused-eager progress")
        teller.join(30)
        assert buffer_of(w) is not None
        other = threading.Thread(target=lambda: modes.append(current_mode()))
        modes: list[str] = []
        other.start()
        other.join(30)
        assert modes == ["fused"]


def test_what_one_thread_gives_away_another_still_reads() -> None:
    """A write gives the memory of its operand to XLA, which ends the array that was made of it."""
    shared = torch.zeros(40_000)
    with old_pool() as pool, fused_eager(native="never", compile="blocking"):
        for k in range(4):
            double = (shared + k).sum()  # pending
            if k:  # not before it has been read as it is

                def write() -> None:
                    with fused_eager():
                        shared.add_(1)

                pool.submit(write).result()
            assert double.item() == (2 * k - 1 if k else 0) * 40_000


@pytest.mark.parametrize("around", [{}, {"mode": "off"}], ids=["nothing", "off"])
def test_a_thread_that_outlives_the_context_is_in_none(around: dict[str, str]) -> None:
    began, go, seen = threading.Event(), threading.Event(), []

    def job() -> None:
        before = torch.ones(10) * 2
        began.set()
        go.wait(30)
        seen.extend([current_mode(), (before + 1).tolist(), (torch.ones(10) * 3).tolist()])

    with fused_eager(**around) if around else nullcontext():
        with fused_eager(mode="fused", native="never"):
            thread = threading.Thread(target=job)
            thread.start()
            began.wait(30)
        go.set()
        thread.join()
    assert seen == ["off", [3.0] * 10, [3.0] * 10]


def test_a_pool_that_outlives_a_context_runs_its_jobs_in_the_next_one() -> None:
    modes = []

    def job() -> None:
        modes.append(current_mode())
        x.add_(1)

    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            x = torch.ones(4)
            with fused_eager(native="never"):
                y = x * 2  # pending, and it is to read what is there now
                pool.submit(job).result()
                z = y + x
            assert z.tolist() == [4.0] * 4
        pool.submit(job).result()
    assert modes == ["fused"] * 3 + ["off"] and x.tolist() == [3.0] * 4


@pytest.mark.parametrize("started", ["inside", "before"])
def test_a_context_that_another_thread_leaves_stays_open(started: str) -> None:
    """As where a generator with one in its body is closed by whoever holds it last."""
    go, raised, context = threading.Event(), [], fused_eager()

    def body() -> Iterator[torch.Tensor]:
        with context:
            yield torch.ones(3) * 2

    def close() -> None:
        go.wait(60)
        try:
            generator.close()
        except FusedEagerError as error:
            raised.append(str(error))

    thread = threading.Thread(target=close)
    if started == "before":
        thread.start()
    generator = body()
    assert next(generator).tolist() == [2.0] * 3
    if started == "inside":
        thread.start()
    go.set()
    thread.join()
    assert len(raised) == 1 and "in the thread that has entered it" in raised[0]
    assert current_mode() == "fused" and (torch.ones(3) + 1).tolist() == [2.0] * 3
    context.__exit__(None, None, None)
    assert current_mode() == "off" and (torch.ones(3) + 1).tolist() == [2.0] * 3
