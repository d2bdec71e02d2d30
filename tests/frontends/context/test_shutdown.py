"""The end of a process: XLA's threads have let go of what is torch's before Python's lock is gone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from fused_eager.frontends.context import shutdown

PROGRAM = """
import os, threading, time
import torch
from fused_eager import fused_eager
x = torch.ones(64, 64)
with fused_eager(native="never", compile="wait"):
    y = x.tanh().sum().item()

def needs_the_lock():  # as one of XLA's that frees a tensor, which gets no answer once the interpreter is at its end
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
    print("freed", flush=True)

threading.Thread(target=needs_the_lock, daemon=True).start()
"""


UNREAD = """
import torch, fused_eager.tpu
table = torch.ones(4, 3, device="tpu", requires_grad=True)
rows = torch.nn.functional.embedding(torch.tensor([0, 4], device="tpu"), table)
rows.sum().backward()
torch.optim.SGD([table], lr=0.1).step()
"""


def test_a_failed_check_that_nobody_has_been_told_of_fails_the_process() -> None:
    told = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, text=True, timeout=300)
    assert told.returncode == 120
    assert "IndexError: index out of range in self (raised by aten.embedding.default at <string>:4)" in told.stderr


def test_whoever_computes_at_the_end_is_waited_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what other threads do")
def test_threads_that_compute_are_told_from_those_that_sleep() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=compute), threading.Thread(target=stop.wait)]
    for thread in threads:
        thread.start()
    seen = False
    limit = time.monotonic() + 30
    while not seen and time.monotonic() < limit:
        time.sleep(0.001)
        seen = shutdown._others_run()
    stop.set()
    for thread in threads:
        thread.join()
    assert seen


def test_a_process_that_ran_nothing_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(shutdown.time, "sleep", slept.append)
    monkeypatch.setattr(shutdown.DEFERRED, "serial", 0)
    shutdown._leave(shutdown.os.getpid())
    monkeypatch.setattr(shutdown.DEFERRED, "serial", 1)
    shutdown._leave(shutdown.os.getpid() + 1)
    assert slept == []
    monkeypatch.setattr(shutdown, "_others_run", lambda: False)
    shutdown._leave(shutdown.os.getpid())
    assert len(slept) == shutdown.QUIET
