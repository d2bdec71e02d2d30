"""Faults that are injected into one of several ranks, and what the others make of them.

`python -m tests.distributed.faults '{"world": 4, "heartbeat": 3, "cases": [["kill", "cpu"]]}'` runs each case on so
many ranks, and prints what came of each of them as one JSON list. The ranks are forked from one process that has
imported torch and JAX and started nothing, so that a case takes a few seconds beside the heartbeat. It has not imported
the library, which in a child of a process that has it leaves everything to torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax  # noqa: F401  (imported once for all ranks)
import torch
import torch.distributed as dist

STEPS = 6
FAULT_AT = 3  # the step in which it is
PATIENCE = timedelta(minutes=10)  # the group's own timeout: far beyond the heartbeat's
BEGINNING = 240  # seconds, before the fault: a machine that does other things takes its time to import all this
FAULTS: dict[str, Callable[[Case], None]] = {}


class Case:
    """What one rank of one case knows."""

    def __init__(self, rank: int, world: int, door: str, folder: Path, heartbeat: float):
        self.rank, self.world, self.door, self.folder, self.heartbeat = rank, world, door, folder, heartbeat
        self.device = "cpu" if door == "cpu" else "tpu"  # "xla", "regions": who does the collectives of the device
        self.victim = min(2, world - 1)  # the rank that the fault is injected into
        self.store: Any = None
        self.backend = ""

    def start(self) -> None:
        """Make the process group."""
        if self.device == "tpu":
            import fused_eager.tpu  # noqa: F401
        backend = self.backend or ("fused_eager" if self.device == "tpu" else "gloo")
        if self.store is None:
            self.store = dist.FileStore(str(self.folder / "store"), self.world)
        dist.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=self.world, timeout=PATIENCE
        )  # fmt: skip
        self.say("began")

    def say(self, what: str) -> None:
        """Tell the one who has started the ranks, with the time."""
        with open(self.folder / f"{self.rank}.said", "a") as file:
            file.write(json.dumps([time.time(), what]) + "\n")
        if what == "fault":  # where a rank is that is still there long after it
            faulthandler.dump_traceback_later(30 + 4 * self.heartbeat)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where the library works."""
        import fused_eager

        return contextlib.nullcontext() if self.device == "tpu" else fused_eager.fused_eager(compile="wait")

    def step(self, number: int) -> None:
        """Compute, and sum over the ranks: the sum is known."""
        x = torch.full((100,), float(self.rank + number), device=self.device)
        y = (x * 2 + 1).sum()
        dist.all_reduce(y)
        expected = sum(100 * (2 * (rank + number) + 1) for rank in range(self.world))
        found = y.item()
        assert found == expected, f"a wrong number: {found} instead of {expected}"

    def steps(self, fault: Callable[[], None], step: Callable[[int], None] | None = None) -> None:
        """All steps; in one of them the fault happens to the victim."""
        self.start()
        with self.context():
            for number in range(STEPS):
                if number == FAULT_AT:
                    self.say("fault")
                    if self.rank == self.victim:
                        fault()
                (step or self.step)(number)
        self.say("done")


def case(function: Callable[[Case], None]) -> Callable[[Case], None]:
    FAULTS[function.__name__] = function
    return function


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@case
def nothing(c: Case) -> None:
    c.steps(lambda: None)


@case
def kill(c: Case) -> None:
    c.steps(_die)


@case
def stop(c: Case) -> None:
    c.steps(_stop)


@case
def leave(c: Case) -> None:
    """It ends its process at once, past everything that Python does at the end."""
    c.steps(lambda: os._exit(7))


@case
def end_early(c: Case) -> None:
    c.steps(lambda: sys.exit(0))


@case
def throw(c: Case) -> None:
    def fault() -> None:
        raise ValueError("the data of this rank are broken")

    c.steps(fault)


@case
def slow(c: Case) -> None:
    """No fault: it takes three times as long as a rank may be silent."""
    c.steps(lambda: time.sleep(3 * c.heartbeat))


@case
def slow_compile(c: Case) -> None:
    from fused_eager.progress import waiting

    def fault() -> None:
        with waiting("compiling 41 ops from train.py:7"):
            time.sleep(3 * c.heartbeat)

    c.steps(fault)


def _in_backward(c: Case, fault: Callable[[], object]) -> None:
    """The others wait in C++, for the reducer of DistributedDataParallel."""
    c.start()
    with c.context():
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(c.device))
        for number in range(STEPS):
            if number == FAULT_AT:
                c.say("fault")
                if c.rank == c.victim:
                    fault()
            model(torch.ones(2, 8, device=c.device)).sum().backward()
    c.say("done")


@case
def stop_in_backward(c: Case) -> None:
    _in_backward(c, _stop)


@case
def kill_in_backward(c: Case) -> None:
    _in_backward(c, _die)


def _while_it_compiles(c: Case, fault: Callable[[], object]) -> None:
    """The others are in a collective, and want what it has begun to compile."""
    from fused_eager.compiling import compile as compiling

    def build(*args: Any, **named: Any) -> Any:
        c.say("compiles")
        time.sleep(2.0)  # the others are in the collective
        c.say("fault")
        fault()

    c.start()
    with c.context():
        if c.rank == c.victim:
            compiling.build = build
        while c.rank != c.victim and "compiles" not in said_by(c.folder, c.victim):
            time.sleep(0.02)
        c.step(0)
    c.say("done")


@case
def kill_while_it_compiles(c: Case) -> None:
    _while_it_compiles(c, _die)


@case
def stop_while_it_compiles(c: Case) -> None:
    _while_it_compiles(c, _stop)


@case
def stop_while_it_is_received_from(c: Case) -> None:
    c.start()
    with c.context():
        c.step(0)
        c.say("fault")
        if c.rank == c.victim:
            _stop()
        dist.recv(torch.zeros(4, device=c.device), c.victim)


@case
def stop_before_a_new_group(c: Case) -> None:
    """The others wait for the store."""
    c.start()
    with c.context():
        c.step(0)
        c.say("fault")
        if c.rank == c.victim:
            _stop()
        group = dist.new_group(list(range(c.world)))
        dist.all_reduce(torch.ones(3, device=c.device), group=group)


@case
def stop_before_a_barrier(c: Case) -> None:
    c.steps(_stop, lambda number: dist.barrier())


@case
def never_arrive(c: Case) -> None:
    if c.rank == c.victim:
        return
    c.say("fault")
    c.start()


@case
def store_gone(c: Case) -> None:
    """Rank 0 holds the store, and is killed while the others compute."""
    c.store = _tcp(c)
    c.start()
    with c.context():
        for number in range(STEPS):
            if number == FAULT_AT:
                c.say("fault")
                if c.rank == 0:
                    _die()
            c.step(number)
    c.say("done")


@case
def store_stopped(c: Case) -> None:
    """Rank 0 holds the store, and is stopped: nobody answers."""
    c.store = _tcp(c)
    c.start()
    with c.context():
        for number in range(STEPS):
            if number == FAULT_AT:
                c.say("fault")
                if c.rank == 0:
                    time.sleep(1.0)  # all have told one another of their connections: a store that hangs tells nobody
                    _stop()
            c.step(number)
    c.say("done")


@case
def store_removed(c: Case) -> None:
    """The file is taken away, and nothing else happens."""
    c.start()
    with c.context():
        for number in range(STEPS):
            if number == FAULT_AT:
                c.say("fault")
                if c.rank == c.victim:
                    (c.folder / "store").unlink()
            c.step(number)
            time.sleep(c.heartbeat / 3)
    c.say("done")


@case
def cache_removed(c: Case) -> None:
    def fault() -> None:
        shutil.rmtree(os.environ["FUSED_EAGER_CACHE_DIR"], ignore_errors=True)  # in regions nothing is kept there

    c.steps(fault)


@case
def disk_full(c: Case) -> None:
    """No file of the victim's may grow beyond what its own words take."""
    c.store = _tcp(c)
    c.start()
    if c.rank == c.victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        with contextlib.suppress(OSError):
            (c.folder / "large").write_bytes(bytes(3000))
            raise AssertionError("there is room on the disk")
    with c.context():
        for number in range(STEPS):
            c.step(number)
    c.say("done")


@case
def a_job_before(c: Case) -> None:
    """No fault: a short job, which all but rank 0 leave before their heartbeats have looked; in the next one they wait
    for rank 0, which is slow."""
    c.start()
    with c.context():
        if c.device == "cpu":  # where the first collective is what begins
            c.step(0)
    if c.rank == 0:
        time.sleep(1.5)
    dist.destroy_process_group()
    c.store = dist.PrefixStore("second", c.store)
    c.start()
    with c.context():
        if c.rank == 0:
            time.sleep(3 * c.heartbeat)
        c.step(1)
    c.say("done")


@case
def leave_in_order(c: Case) -> None:
    """No fault: one has done its part, leaves its group, and is gone at once, while the others go on."""
    c.start()
    others = dist.new_group([rank for rank in range(c.world) if rank != c.victim])
    with c.context():
        c.step(0)
        if c.rank == c.victim:
            dist.destroy_process_group()
            c.say("done")
            os._exit(0)
        for _ in range(4):
            time.sleep(c.heartbeat / 3)
            dist.all_reduce(torch.ones(3, device=c.device), group=others)
    c.say("done")


@case
def go_on_without_it(c: Case) -> None:
    """The others make a group without the one that is lost."""
    import fused_eager

    c.start()
    with c.context():
        try:
            for number in range(STEPS):
                if number == FAULT_AT:
                    c.say("fault")
                    if c.rank == c.victim:
                        _die()
                c.step(number)
        except fused_eager.RankLost:
            dist.destroy_process_group()
        others = [rank for rank in range(c.world) if rank != c.victim]
        c.rank, c.world, named = others.index(c.rank), len(others), c.rank
        c.store = dist.PrefixStore("second", c.store)
        c.start()
        for number in range(STEPS):
            c.step(number)
        c.rank = named
    c.say("done")


@case
def differ(c: Case) -> None:
    def step(number: int) -> None:
        if number == FAULT_AT and c.rank == c.victim:
            dist.all_reduce(torch.ones(100, device=c.device), op=dist.ReduceOp.MAX)
        else:
            dist.all_reduce(torch.ones(100, device=c.device))

    c.steps(lambda: None, step)


@case
def a_pending_collective_at_the_end(c: Case) -> None:
    """The others end their programs while a collective is on its way that the victim has never begun."""
    c.start()
    with c.context():
        c.step(0)
        c.say("fault")
        if c.rank == c.victim:
            _stop()
        dist.all_reduce(torch.ones(3, device=c.device), async_op=True)


def _tcp(c: Case) -> Any:
    port = c.folder / "port"
    if c.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, c.world, True, timedelta(seconds=60), wait_for_workers=False)
        (c.folder / "port.new").write_text(str(store.port))
        (c.folder / "port.new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    at, minute = int(port.read_text()), timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", at, c.world, False, minute, wait_for_workers=False)


# ---- running them -------------------------------------------------------------------------------------------------


def said_by(folder: Path, rank: int) -> str:
    """All that a rank has said until now."""
    path = folder / f"{rank}.said"
    return path.read_text() if path.exists() else ""


def _rank(name: str, c: Case) -> None:
    """The body of a forked rank: it ends as any program does."""
    for number, end in ((1, "out"), (2, "err")):
        fd = os.open(c.folder / f"{c.rank}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, number)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(BEGINNING - 10)
    try:
        FAULTS[name](c)
    except Exception:
        c.say("raised")
        raise


def ended(
    pids: list[int], seconds: float, no_more: Callable[[int], bool], is_on: Callable[[], bool]
) -> Iterator[tuple[int, int | None, float]]:
    """Each rank with its exit code and when it ended; None of those that are still there so many seconds after the
    fault, which `is_on` tells of."""
    left, deadline, was_on = dict(enumerate(pids)), time.time() + BEGINNING, False
    while left and time.time() < deadline and not all(map(no_more, left)):
        if not was_on and is_on():
            was_on, deadline = True, time.time() + seconds
        for rank, pid in list(left.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del left[rank]
                yield rank, os.waitstatus_to_exitcode(status), time.time()
        time.sleep(0.02)
    for rank, pid in left.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        yield rank, None, time.time()


def run(name: str, door: str, world: int, heartbeat: float) -> dict[str, Any] | None:
    """One case; None in a forked rank, which is to end."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ.update(
        FUSED_EAGER_CACHE_DIR=str(folder / "cache"), FUSED_EAGER_HEARTBEAT=str(heartbeat),
        FUSED_EAGER_ARRIVAL=str(heartbeat if name == "never_arrive" else 60), FUSED_EAGER_DEVICES="1",
        FUSED_EAGER_CHECK_COLLECTIVES="1" if name == "differ" else "0",
        FUSED_EAGER_COMPILE="wait" if name.endswith("it_compiles") else "auto",
    )  # fmt: skip
    os.environ.update(WORLD_SIZE=str(world), FUSED_EAGER_COLLECTIVES=door if door in ("xla", "regions") else "host")
    with socket.create_server(("", 0)) as found:  # where JAX's runtimes meet, if they are to
        os.environ["JAX_COORDINATOR_ADDRESS"] = f"localhost:{found.getsockname()[1]}"
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            _rank(name, Case(rank, world, door, folder, heartbeat))
            return None
        pids.append(pid)
    is_stopped = ("stop" in name or name == "a_pending_collective_at_the_end") and name != "store_removed"
    victim = 0 if name.startswith("store_") and name != "store_removed" else min(2, world - 1)
    codes: dict[int, int | None] = {}
    at: dict[int, float] = {}

    def is_on() -> bool:
        return any('"fault"' in said_by(folder, rank) for rank in range(world))

    for rank, code, when in ended(pids, 60 + 5 * heartbeat, lambda rank: is_stopped and rank == victim, is_on):
        codes[rank], at[rank] = code, when
    said: dict[int, list[Any]] = {}
    for rank in range(world):
        said[rank] = [json.loads(line) for line in said_by(folder, rank).splitlines()]
    faults = [when for of in said.values() for when, what in of if what == "fault"]
    raised = [when for rank, of in said.items() for when, what in of if what == "raised" and rank != victim]
    out = {
        "name": name, "door": door, "victim": victim,
        "codes": [codes[rank] for rank in range(world)],
        "seconds": max(raised) - min(faults) if raised and faults else None,
        "ended": max((when for rank, when in at.items() if rank != victim), default=0.0) - min(faults, default=0.0),
        "errors": [(folder / f"{rank}.err").read_text(errors="replace") for rank in range(world)],
        "said": [[what for _, what in said[rank]] for rank in range(world)],
    }  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    return out


def main() -> None:
    task = json.loads(sys.argv[1])
    found = []
    for name, door in task["cases"]:
        result = run(name, door, task["world"], task["heartbeat"])
        if result is None:
            return
        found.append(result)
        print(f"{name} at {door}: {result['codes']}, {result['seconds']}", file=sys.stderr, flush=True)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
