"""The heap: what is free goes back to the system once it has grown, and is left alone while it has not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from fused_eager import fused_eager
from fused_eager.compiling import background
from fused_eager.devices.host import heap
from fused_eager.devices.host.heap import EVERY, GROWN, PART, ROOM, Watch
from fused_eager.policy import autotuner
from fused_eager.policy.segment import Segment
from tests.streams import open_stream

MB = 1 << 20


class Machine:
    """A clock, a resident set and a count of calls that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.resident, self.given, self.takes = 100.0, 500 * MB, 0, 0.0
        monkeypatch.setattr(heap.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(heap, "resident", lambda: self.resident)
        monkeypatch.setattr(heap, "give_back", self._give_back)

    def _give_back(self) -> None:
        self.given += 1
        self.now += self.takes

    def after(self, watch: Watch, resident: int, seconds: float = EVERY) -> bool:
        self.now += seconds
        self.resident = resident
        return watch.look()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_growth_is_given_back_and_what_is_needed_again_is_not(machine: Machine) -> None:
    watch = Watch()
    assert not machine.after(watch, 500 * MB)
    limit = int(GROWN * 500 * MB) + ROOM
    assert not machine.after(watch, limit)
    assert machine.after(watch, limit + 1) and machine.given == 1
    # All of it was in use: that is what it needs now.
    assert not machine.after(watch, limit + 1)
    assert not machine.after(watch, limit + 1) and machine.given == 1
    assert machine.after(watch, 2 * limit) and machine.given == 2


def test_it_is_not_looked_at_more_often_than_every_few_seconds(machine: Machine) -> None:
    watch = Watch()
    machine.after(watch, 500 * MB)
    assert not machine.after(watch, 5000 * MB, EVERY / 2) and machine.given == 0
    assert machine.after(watch, 5000 * MB, EVERY / 2)


def test_a_large_heap_that_takes_long_is_left_alone_longer(machine: Machine) -> None:
    watch = Watch()
    machine.takes = 10 * EVERY * PART
    machine.after(watch, 500 * MB)
    assert machine.after(watch, 1000 * MB)
    machine.after(watch, 1000 * MB, 10 * EVERY)
    assert not machine.after(watch, 5000 * MB, 9 * EVERY)
    assert machine.after(watch, 5000 * MB, 2 * EVERY)


def test_where_memory_is_used_in_another_way_nothing_has_to_grow(machine: Machine) -> None:
    watch = Watch()
    machine.after(watch, 500 * MB)
    watch.stir()
    assert not machine.after(watch, 400 * MB, EVERY / 2)
    assert machine.after(watch, 400 * MB, EVERY / 2) and machine.given == 1
    # What has come back may be what only that moment needed: once more.
    assert machine.after(watch, 400 * MB) and machine.given == 2
    # Then it is what it is.
    assert not machine.after(watch, 400 * MB)
    assert not machine.after(watch, 400 * MB) and machine.given == 2
    assert machine.after(watch, 500 * MB)


def test_where_the_way_changes_it_is_given_back_before_the_other_one_takes_its_own(machine: Machine) -> None:
    watch = Watch()
    machine.takes = 1.5 * EVERY * PART
    machine.after(watch, 500 * MB)
    watch.turn()
    assert machine.given == 1
    # No more of all time than a part of it, however often it changes.
    watch.turn()
    assert machine.given == 1
    machine.now += EVERY
    watch.turn()
    assert machine.given == 2


def test_a_change_of_ways_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[bool] = []
    monkeypatch.setattr(heap.WATCH, "turn", lambda: turns.append(open_stream().policy.autotuner.native))
    ways = [False, False, True, True, False, False]
    monkeypatch.setattr(Segment, "wants_native", lambda self: ways.pop(0))
    x = torch.ones(300)
    autotuner.forget()
    with fused_eager(mode="fused", native="measured", compile="auto"):
        while ways:
            x.mul_(0.9).sum().item()
            background.wait()
    # The last one: regions run for the first time, which have been compiled meanwhile.
    assert turns == [True, False, False]


def test_it_is_given_back_again_until_that_makes_no_difference(machine: Machine) -> None:
    watch = Watch()
    machine.takes = 10 * EVERY * PART  # nobody waits longer for that
    machine.after(watch, 500 * MB)
    watch.stir()
    assert [machine.after(watch, n * MB) for n in (900, 800, 700, 600)] == [True] * 4
    assert [machine.after(watch, 600 * MB, 10 * EVERY) for _ in range(3)] == [False] * 3


def test_growth_that_was_gone_at_the_next_look_is_given_back_once_more(machine: Machine) -> None:
    watch = Watch()
    machine.after(watch, 500 * MB)
    assert machine.after(watch, 1000 * MB) and machine.after(watch, 800 * MB)
    assert not machine.after(watch, 800 * MB) and machine.given == 2


def test_a_loop_looks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    for other in ("stir", "turn"):  # what else leads to giving back
        monkeypatch.setattr(watch, other, lambda: None)
    monkeypatch.setattr(heap, "WATCH", watch)
    x = torch.ones(3)
    with fused_eager(mode="fused"):
        for seconds, resident in ((EVERY, 500), (EVERY, 1000)):
            machine.now += seconds
            machine.resident = resident * MB
            (x * 2).sum().item()
    assert machine.given == 1


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is known")


@glibc
def test_what_lies_below_something_that_is_in_use_goes_back_too() -> None:
    torch.ones(1)
    blocks = [torch.ones(25_000) for _ in range(1000)]  # 100 kB each: from the heap
    blocks = blocks[-1:]  # the last one keeps the heap from shrinking
    before = heap.resident()
    heap.give_back()
    assert heap.resident() < before - 50 * MB
    assert blocks[0].sum() == 25_000


HEAPS = """
import ctypes
import resource
import threading

from fused_eager.devices.host import heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
taken = []


def take(megabytes):
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(megabytes << 20)))
    ctypes.memset(block, 1, megabytes << 20)
    return block


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    libc.free(take(20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def work():
    taken.extend(take(18) for _ in range(3))  # what comes next does not fit in the first heap of this thread
    print(min([faults() for _ in range(6)][1:]))


kept = heap.keep_blocks() >> 20
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""

BLOCKS = HEAPS.replace("taken.extend(take(18) for _ in range(3))", "pass").replace("take(20)", "take(kept - 1)")


def _number(program: str, **environment: str) -> int:
    """In a process of its own: what glibc keeps depends on all that it was asked for before."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**inherited, **environment}, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr
    return int(done.stdout.split()[-1])


@glibc
def test_a_heap_with_nothing_left_in_it_is_kept() -> None:
    assert _number(HEAPS) < 100


@glibc
def test_blocks_are_kept_up_to_the_size_that_is_promised() -> None:
    assert _number(BLOCKS) < 100
    assert _number("from fused_eager.devices.host import heap; print(heap.keep_blocks())") in (heap.LARGE, heap.LARGEST)


@glibc
@pytest.mark.parametrize(
    "set_by_user",
    [{"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"}],
    ids=lambda names: next(iter(names)),
)
def test_what_the_user_has_told_glibc_holds(set_by_user: dict[str, str]) -> None:
    assert _number(HEAPS, **set_by_user) > 5000


ARENAS = """
import ctypes, tempfile, threading
import torch
from fused_eager import fused_eager
with fused_eager(compile="wait", native="never", cache="off"):
    (torch.ones(1000) * 2 + 1).sum().item()
libc, meet = ctypes.CDLL(None), threading.Barrier(6)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def take():
    meet.wait()  # all are there at once, or one would take over what another has left
    libc.malloc(100_000)
    meet.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with tempfile.NamedTemporaryFile() as file:
    opened = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, opened)
    libc.fclose(opened)
    print(file.read().decode().count("<heap nr="))
"""


@glibc
def test_threads_that_begin_after_a_context_share_an_arena() -> None:
    """Torch's own, which have begun before, may have others."""
    assert _number(ARENAS) <= 3


@glibc
def test_whoever_says_how_many_arenas_there_are_gets_them() -> None:
    assert _number(ARENAS, MALLOC_ARENA_MAX="64") >= 7


TRAINING = """
import resource

import torch
from torch import nn

from fused_eager import fused_eager
from fused_eager.devices.host import heap

heap.give_back = lambda: None  # which is every two seconds at first, and pages come again in several steps
model = nn.Sequential(*[module for _ in range(12) for module in (nn.Linear(512, 512), nn.Tanh())])
x = torch.randn(4096, 512)


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    loss.item()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


with fused_eager(mode="fused", native="never", compile="wait"):
    print(min([faults() for _ in range(8)][3:]))
"""


@glibc
def test_the_temporaries_of_a_region_are_not_taken_from_the_system_anew() -> None:
    """In a training step whose values for the way back take 200 MB, which are 50,000 pages."""
    assert _number(TRAINING) < 3_000


def test_without_a_libc_nothing_is_taught_or_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: None) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(heap.ctypes, "CDLL", absent)
    for cached in (heap.libc, heap.keep_blocks, heap.share_arena):
        cached.cache_clear()
    heap.keep_blocks()
    heap.share_arena()
    heap.give_back()
    for cached in (heap.libc, heap.keep_blocks, heap.share_arena):
        cached.cache_clear()
