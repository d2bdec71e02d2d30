"""Threads and processes: finished values, or a clear error; never unwritten memory, never a hang."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch

from fused_eager import FusedEagerError, current_mode, fused_eager, sync

from .programs import in_process


def call_in(target: Any) -> Any:
    """A function's result in a new thread; its exception is raised here."""
    box: list[Any] = []

    def body() -> None:
        try:
            box.append((target(), None))
        except BaseException as error:
            box.append((None, error))

    t = threading.Thread(target=body, daemon=True)
    t.start()
    t.join(60)
    assert box, "the thread hangs"
    value, error = box[0]
    if error is not None:
        raise error
    return value


class Worker:
    """A thread that was there before the context and does what it is sent."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.results: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        for job in iter(self.jobs.get, None):
            try:
                self.results.put((job(), None))
            except BaseException as error:
                self.results.put((None, error))

    def __call__(self, job: Any) -> Any:
        self.jobs.put(job)
        value, error = self.results.get(timeout=60)
        if error is not None:
            raise error
        return value


READERS = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: sum(t.tolist()),
    "numpy": lambda t: float(t.numpy().sum()),
    "compute": lambda t: float((t * 1 + 0).sum()),
    "in place": lambda t: float(t.add_(0).sum()),
    "repr": lambda t: 6.0 if repr(t) == "tensor([2., 2., 2.])" else repr(t),
}


@pytest.mark.parametrize("name", READERS)
def test_a_thread_started_inside(name: str, mode: str) -> None:
    with fused_eager(mode=mode):
        x = torch.ones(3) * 2
        assert call_in(lambda: READERS[name](x)) == 6.0


@pytest.mark.parametrize("name", READERS)
def test_a_value_made_after_the_thread_started(name: str, mode: str) -> None:
    worker = Worker()
    with fused_eager(mode=mode):
        inside = Worker()
        x = torch.ones(3) * 2
        assert inside(lambda: READERS[name](x)) == 6.0
        y = torch.ones(3) * 2
        try:
            assert worker(lambda: READERS[name](y)) == 6.0
        except FusedEagerError:
            pass  # a thread that was there first may be refused, in our own words
        assert y.tolist() == [2.0] * 3
    inside.jobs.put(None)
    worker.jobs.put(None)


def test_a_native_write_in_another_thread(mode: str) -> None:
    with fused_eager(mode=mode):
        worker = Worker()
        x = torch.empty(2000).fill_(1.0)
        sync()
        y = x + 1
        worker(lambda: x.fill_(9.0))
        assert y.tolist() == [2.0] * 2000 and (x + 1).tolist() == [10.0] * 2000
    worker.jobs.put(None)


def test_a_write_in_another_context(mode: str) -> None:
    def write() -> None:
        with fused_eager(mode=mode):
            x.add_(5)
            z.mul_(2)

    worker = Worker()
    with fused_eager(mode=mode):
        x = torch.empty(2000).fill_(1.0)
        z = torch.ones(2000) * 4
        sync()
        y = x + z
        worker(write)
        assert y.tolist() == [5.0] * 2000
        assert x.tolist() == [6.0] * 2000 and z.tolist() == [8.0] * 2000
    worker.jobs.put(None)


def test_a_pending_value_in_another_context(mode: str) -> None:
    def use() -> Any:
        with fused_eager(mode=mode):
            y = x * 2
            x.add_(1)
            return y, y.sum().item()

    worker = Worker()
    with fused_eager(mode=mode):
        x = torch.ones(3) * 2
        y, total = worker(use)
        assert total == 12.0 and (x + y).tolist() == [7.0] * 3
    worker.jobs.put(None)


def test_a_thread_started_inside_is_in_the_context(mode: str) -> None:
    with fused_eager(mode=mode):
        assert call_in(current_mode) == mode
        assert call_in(lambda: call_in(current_mode)) == mode
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(current_mode).result() == mode
        worker = Worker()
        with fused_eager(mode="off"):
            assert call_in(current_mode) == "off"
    assert call_in(current_mode) == "off"
    worker.jobs.put(None)


def test_a_thread_that_outlives_the_context(mode: str) -> None:
    with fused_eager(mode=mode):
        worker = Worker()
        made = worker(lambda: torch.ones(3) * 2)
        kept = made + 1
    original = torch.Tensor.numpy
    assert kept.numpy().tolist() == [3.0] * 3 and made.numpy().tolist() == [2.0] * 3

    def after() -> list[float]:
        t = made * 2
        kept.add_(1)
        return torch.from_numpy(t.numpy()).tolist()

    assert worker(after) == [4.0] * 3 and kept.tolist() == [4.0] * 3
    assert torch.Tensor.numpy is original  # nothing is patched any more, though the thread is still there

    def own() -> Any:
        with fused_eager(mode=mode):
            u = made * 3
            return current_mode(), u.tolist(), u

    mode_there, values, u = worker(own)
    assert (mode_there, values, u.tolist()) == (mode, [6.0] * 3, [6.0] * 3)
    assert torch.Tensor.numpy is original
    worker.jobs.put(None)


def test_a_context_of_its_own_in_a_thread_started_inside(mode: str) -> None:
    entered, closed = threading.Event(), threading.Event()

    def body() -> tuple[str, str, list[float], list[float]]:
        outer = current_mode()
        with fused_eager(mode=mode, max_pending=7):
            x = torch.ones(3) * 2
            entered.set()
            closed.wait(30)
            y = x + 1  # the starter's context is gone, this one is not
            inner, values = current_mode(), y.tolist()
        return outer, inner, values, (y * 2).tolist()

    box: list[Any] = []
    with fused_eager(mode=mode):
        t = threading.Thread(target=lambda: box.append(body()), daemon=True)
        t.start()
        entered.wait(30)
    closed.set()
    t.join(30)
    assert box == [(mode, mode, [3.0] * 3, [6.0] * 3)]


def test_what_is_pending_in_a_thread_when_the_context_closes(mode: str) -> None:
    done, go = threading.Event(), threading.Event()
    box: list[torch.Tensor] = []

    def body() -> None:
        box.append(torch.ones(3) * 2)
        done.set()
        go.wait(30)
        box.append(box[0] + 1)

    with fused_eager(mode=mode):
        t = threading.Thread(target=body, daemon=True)
        t.start()
        done.wait(30)
    assert box[0].tolist() == [2.0] * 3  # in no context, and the thread still runs
    go.set()
    t.join(30)
    assert box[1].tolist() == [3.0] * 3


def test_a_failure_in_a_thread_is_told_there(mode: str) -> None:
    with fused_eager(mode=mode):
        with pytest.raises(IndexError, match="embedding"):
            call_in(lambda: torch.nn.functional.embedding(torch.tensor([9]), torch.ones(4, 2) * 2).tolist())
        assert (torch.ones(3) * 2).tolist() == [2.0] * 3


def test_pools(mode: str) -> None:
    with ThreadPoolExecutor(2) as before, ThreadPool(2) as pool, fused_eager(mode=mode):
        x = torch.ones(3) * 2
        assert list(before.map(lambda i: float((x * i).sum()), range(4))) == [0.0, 6.0, 12.0, 18.0]
        with ThreadPoolExecutor(2) as inside:
            y = x + 1
            assert [f.result() for f in [inside.submit(lambda: float(y.sum())) for _ in range(3)]] == [9.0] * 3
        z = x + 2
        try:
            assert pool.map(lambda i: float((z * i).sum()), range(3)) == [0.0, 12.0, 24.0]
        except FusedEagerError:
            pass
        assert z.tolist() == [4.0] * 3


def test_contexts_in_several_threads_at_once(mode: str) -> None:
    def train(seed: int) -> list[float]:
        with fused_eager(mode=mode):
            w = torch.full((3,), float(seed), requires_grad=True)
            losses = []
            for _ in range(4):
                loss = ((w - 1) ** 2).sum()
                loss.backward()
                with torch.no_grad():
                    w -= 0.1 * w.grad
                w.grad = None
                losses.append(loss.item())
            return losses

    expected = [train(k) for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(train, range(4))) == expected


def test_another_threads_failure_is_not_ours(mode: str) -> None:
    first, second = threading.Event(), threading.Event()

    def fails() -> str:
        with fused_eager(mode=mode):
            try:
                bad = torch.nn.functional.embedding(torch.tensor([9]), torch.ones(4, 2) * 2)
                first.set()
                second.wait(30)
                bad.tolist()
            except IndexError:
                first.set()
                return "told"
            return "not told"

    worker = Worker()
    worker.jobs.put(fails)
    first.wait(30)
    try:
        with fused_eager(mode=mode):
            assert (torch.ones(3) * 2).tolist() == [2.0] * 3
            sync()
    finally:
        second.set()
    assert worker.results.get(timeout=60) == ("told", None)
    worker.jobs.put(None)


def test_two_threads_reading_each_others_values_do_not_hang(mode: str) -> None:
    said = in_process(f"""
        import threading, torch
        from fused_eager import fused_eager
        shared = [torch.ones(3), torch.ones(3)]
        barrier = threading.Barrier(2)
        def body(me):
            with fused_eager(mode={mode!r}):
                for _ in range(60):
                    barrier.wait()
                    shared[me] = torch.ones(3) * 2 + 1
                    barrier.wait()
                    x = shared[1 - me] + shared[me]
                    assert x.tolist() == [6.0] * 3, x
        ts = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(2)]
        [t.start() for t in ts]
        [t.join(40) for t in ts]
        print("hang" if any(t.is_alive() for t in ts) else "done", flush=True)
        import os; os._exit(0)
    """)
    assert said == "done\n"


def test_backward_in_another_thread(mode: str) -> None:
    with fused_eager(mode=mode):
        w = torch.ones(3, requires_grad=True)
        loss = (w * 2).sum()
        call_in(loss.backward)
        assert w.grad.tolist() == [2.0] * 3


def test_fork_with_pending_work(mode: str) -> None:
    said = in_process(f"""
        import os, torch, warnings
        warnings.simplefilter("ignore")
        from fused_eager import fused_eager, sync
        with fused_eager(mode={mode!r}):
            x = torch.ones(3) * 2
            y = x + 1
            child = os.fork()
            z = (x + y) * 2
            z.add_(1)
            w = z.t() if z.dim() == 2 else z.view(3)
            print("child" if child == 0 else "parent", z.tolist(), w.sum().item(), repr(y), flush=True)
            if child:
                os.waitpid(child, 0)
        with fused_eager(mode={mode!r}):
            again = (z * 2).tolist()
        if child == 0:
            os._exit(0 if again == [22.0] * 3 else 3)
        print(again)
    """)
    assert sorted(said.splitlines()) == sorted(
        [
            "child [11.0, 11.0, 11.0] 33.0 tensor([3., 3., 3.])",
            "parent [11.0, 11.0, 11.0] 33.0 tensor([3., 3., 3.])",
            "[22.0, 22.0, 22.0]",
        ]
    )


def test_fork_does_not_swallow_a_failure() -> None:
    said = in_process("""
        import os, torch, warnings
        warnings.simplefilter("ignore")
        from fused_eager import fused_eager, sync
        try:
            with fused_eager(mode="fused"):
                bad = torch.nn.functional.embedding(torch.tensor([9]), torch.ones(4, 2) * 2)
                child = os.fork()
                if child == 0:
                    try:
                        print("child", bad.tolist(), flush=True)
                    except RuntimeError as error:
                        pass
                    except IndexError as error:
                        pass
                    os._exit(0)
                os.waitpid(child, 0)
            print("nothing raised")
        except IndexError:
            print("told")
    """)
    assert said == "told\n"


def test_a_data_loader_with_forked_workers(mode: str) -> None:
    said = in_process(
        f"""
        import torch, warnings
        warnings.simplefilter("ignore")
        from torch.utils.data import DataLoader, Dataset
        from fused_eager import fused_eager
        class Data(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return (torch.full((3,), float(i)) * scale + 1).view(3), i
        with fused_eager(mode={mode!r}):
            scale = torch.ones(3) * 2
            total = torch.zeros(3)
            for x, i in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
                total += x.sum(0) * 1
            print(total.tolist())
    """,
        seconds=120,
    )
    assert said == "[64.0, 64.0, 64.0]\n"


def test_a_queue_between_processes(mode: str) -> None:
    said = in_process(f"""
        import torch, warnings
        warnings.simplefilter("ignore")
        import torch.multiprocessing as mp
        from fused_eager import fused_eager
        def child(q, r):
            t = q.get()
            t.add_(1)
            r.put(float(t.sum()))
        ctx = mp.get_context("fork")
        q, r = ctx.Queue(), ctx.Queue()
        p = ctx.Process(target=child, args=(q, r))
        p.start()
        with fused_eager(mode={mode!r}):
            x = torch.ones(3) * 2
            y = x + 1
            q.put(x)
            print(r.get(timeout=40))
            print(x.tolist(), y.tolist(), (x + 0).tolist())
            x.mul_(2)
            print(x.tolist())
        p.join()
    """)
    assert said.splitlines() == ["9.0", "[3.0, 3.0, 3.0] [3.0, 3.0, 3.0] [3.0, 3.0, 3.0]", "[6.0, 6.0, 6.0]"]


def test_subprocess_and_spawn(mode: str) -> None:
    import subprocess
    import sys

    with fused_eager(mode=mode):
        x = torch.ones(3) * 2
        out = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, check=True)
        assert out.stdout == "1\n" and x.tolist() == [2.0] * 3
