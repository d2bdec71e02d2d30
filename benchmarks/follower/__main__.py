"""`python -m benchmarks.follower`: microseconds per op on tiny tensors, plain, through Python, and through C++."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.follower.prototype import Follower
from benchmarks.workloads import WORKLOADS
from fused_eager import fused_eager, record, sync
from fused_eager.buffers import TABLE, storage_of
from fused_eager.calls import CALLS, Call
from fused_eager.pending import new_tensor
from fused_eager.threads import current_door

ROUNDS, CALLS_PER_BLOCK, WARM = 9, 20, 3
OPS = WORKLOADS["tiny"].full["ops"]


class Nothing(TorchDispatchMode):
    """Hands every op back to torch."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OneTensor(Nothing):
    """Returns the same tensor for every op: what it costs to get into Python and back, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.zeros(8)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tensor


def fused() -> AbstractContextManager[Any]:
    """Fused, every op recorded."""
    return fused_eager(mode="fused", native="never", compile="wait")


@dataclass(frozen=True)
class Way:
    """One line of the table. `after` follows each timed call and is not part of it."""

    about: str
    enter: Callable[[], AbstractContextManager[Any]]
    after: Callable[[], None] = lambda: None


def ways(follower: Follower) -> list[Way]:
    """The ways in which the chain is run."""

    @contextmanager
    def compiled(check_place: bool, allocate: bool) -> Iterator[None]:
        with Nothing(), follower.follow(check_place, allocate):
            yield

    return [
        Way("plain eager, kernel included", nullcontext),
        Way("a mode in Python that does nothing", Nothing),
        Way("a mode in Python that returns one tensor", OneTensor),
        Way("our front door, nothing behind it", door_only),
        Way("our follower, in Python", fused, sync),
        Way("the prototype in C++", lambda: compiled(True, True), follower.forget),
        Way("the prototype, lines not compared", lambda: compiled(False, True), follower.forget),
        Way("the prototype, memory with the value", lambda: compiled(True, False), follower.forget),
    ]


def block(way: Way, step: Callable[[], Any]) -> float:
    """Microseconds of this thread's processor time per op, the median over a block of calls."""
    times = []
    with way.enter():
        for number in range(WARM + CALLS_PER_BLOCK):
            start = time.thread_time()
            result = step()
            seconds = time.thread_time() - start
            way.after()
            del result
            if number >= WARM:
                times.append(seconds)
    return 1e6 * statistics.median(times) / OPS


def each(work: Callable[[], object], count: int = 2000) -> float:
    """Microseconds of one call of `work`, the best of several loops."""

    def loop(call: Callable[[], object]) -> float:
        start = time.thread_time()
        for _ in range(count):
            call()
        return time.thread_time() - start

    return 1e6 * (min(loop(work) for _ in range(9)) - min(loop(lambda: None) for _ in range(9))) / count


@contextmanager
def door_only() -> Iterator[None]:
    """The front door with nothing behind it: what is recorded is one tensor that was there before."""
    tensor, real = torch.zeros(8), record.record
    record.record = lambda *call: tensor
    try:
        with fused():
            yield
    finally:
        record.record = real


def output() -> tuple[float, float]:
    """Microseconds of making an output's tensor, and of tagging it: its buffer, the table, the trap."""
    empty = each(lambda: torch.empty_strided((8,), (1,), dtype=torch.float32))
    with fused():
        door = current_door()
        assert door is not None
        y = torch.randn(8) * 0.999
        call = next(call for call in reversed(CALLS.values()) if isinstance(call, Call))

        def tagged() -> None:
            t = new_tensor(door.stream, call.outputs[0], 0, [])
            door.stream.pending.pop(TABLE.pop(storage_of(t)._cdata).cdata)

        with _disable_current_modes():  # as they are where an op is handled
            made = each(tagged)
        del y
    return empty, made - empty


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            follower = Follower(Path(folder))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        step = WORKLOADS["tiny"].build(lambda function: function)
        with Nothing(), follower.record():
            step()
        assert follower.steps == OPS
        lines = ways(follower)
        with fused():
            for _ in range(20):
                step()
                sync()
        rows: list[list[float]] = [[] for _ in lines]
        for _ in range(ROUNDS):
            for way, row in zip(lines, rows, strict=True):
                row.append(block(way, step))
        assert not follower.missed
        print(f"microseconds per op, {OPS} ops on 8 floats, medians over {ROUNDS} alternating blocks; against eager")
        for way, row in zip(lines, rows, strict=True):
            ratio = statistics.median(ours / plain for ours, plain in zip(row, rows[0], strict=True))
            print(f"{way.about:42} {statistics.median(row):5.2f}  {ratio:5.2f}")
        _, _, entry, door, total, *_ = (statistics.median(row) for row in rows)
        empty, tagging = output()
        split = {
            "into __torch_dispatch__ and back": entry,
            "the front door": door - entry,
            "comparing, and adding the node": total - door - empty - tagging,
            "empty_strided": empty,
            "tagging the output": tagging,
        }
        print("of which, for our follower in Python:")
        for name, value in split.items():
            print(f"  {name:40} {value:5.2f}  {value / total:4.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
