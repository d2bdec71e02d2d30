"""`python -m benchmarks.follower`: microseconds per op on tiny tensors: plain, followed in Python, followed in C++."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads import WORKLOADS
from fused_eager import follower, fused_eager, sync

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


def following(who: str) -> Callable[[], AbstractContextManager[Any]]:
    """Fused, every op recorded."""
    return lambda: fused_eager(mode="fused", native="never", compile="wait", follower=who)


@contextmanager
def in_python() -> Iterator[None]:
    """No op is followed in C++."""
    follower.pause(True)
    try:
        yield
    finally:
        follower.pause(False)


def finished() -> None:
    """Until the device has done what it was asked."""
    torch.tpu.synchronize()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Way:
    """One line of the table. `after` follows each timed call and is not part of it."""

    about: str
    enter: Callable[[], AbstractContextManager[Any]]
    after: Callable[[], None] = lambda: None
    device: str = "cpu"  # of the tensors


WAYS = (
    Way("plain eager, kernel included", nullcontext),
    Way("a mode in Python that does nothing", Nothing),
    Way("a mode in Python that returns one tensor", OneTensor),
    Way("followed in Python", following("python"), sync),
    Way("followed in C++", following("compiled"), sync),
)
ON_THE_DEVICE = (
    Way("on the device, followed in Python", in_python, finished, "tpu"),
    Way("on the device, followed in C++", nullcontext, finished, "tpu"),
)


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.follower", description=__doc__)
    parser.add_argument("--device", action="store_true", help="ops of the device too, which this process then has")
    ways = WAYS
    if parser.parse_args(argv).device:
        import fused_eager.tpu  # noqa: F401 (registers it)

        ways += ON_THE_DEVICE
    steps = {}
    for device in {way.device for way in ways}:
        with torch.device(device):
            steps[device] = WORKLOADS["tiny"].build(lambda function: function)
    try:
        for way in ways:  # what is compiled and built is there before anything is timed
            block(way, steps[way.device])
    except follower.FollowerUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    rows: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, row in zip(ways, rows, strict=True):
            row.append(block(way, steps[way.device]))
    print(f"microseconds per op, {OPS} ops on 8 floats, medians over {ROUNDS} alternating blocks; against eager")
    for way, row in zip(ways, rows, strict=True):
        ratio = statistics.median(ours / plain for ours, plain in zip(row, rows[0], strict=True))
        print(f"{way.about:42} {statistics.median(row):5.2f}  {ratio:5.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
