"""Memory: what an op takes at its peak, in eager and here, for samples of torch's op corpus made large.

`python -m tests.ops.memory` measures all of it and prints a table of what takes more than `BOUND` of eager's.

A sample is made large by making one of its sizes so many times as large, in all of its tensors alike, whose numbers are
repeated: what is an index stays one. What an op allows is found by asking eager.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from fused_eager.compiling import compile as compiling
from fused_eager.compiling.executable import Executable
from fused_eager.compiling.key import Computation
from fused_eager.devices.host import heap
from fused_eager.devices.host.scratch import SCRATCH
from fused_eager.executing import load
from fused_eager.process import resident

from .corpus import OPS, Case, begin_anew, cases, excluded, program_of
from .outcomes import outcome

BOUND = 3.0  # of eager's peak that is told
ENOUGH = 24 << 20  # bytes of eager's peak from which on it is compared
LARGEST = 96 << 20  # bytes that the arguments of a sample may have
SLOW = 1.0  # seconds of the processor's in eager after which a sample is made no larger
BLOCK = 1 << 17  # bytes of what goes back to the system at once
FIRST = 1 << 20  # bytes of the first, small one
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
# Not measured: in eager alone the gradient of a large sample takes all of a machine of 24 GB.
UNMEASURED = frozenset({"linalg_householder_product"})


@dataclass(frozen=True)
class Found:
    """What was measured of one sample: bytes at the peak, in eager and here, and the op whose region took most."""

    case: Case
    sample: int
    shapes: str
    eager: int
    here: int
    region: str = ""

    @property
    def ratio(self) -> float:
        """How many times eager's peak."""
        return self.here / max(self.eager, 1)


def is_supported() -> bool:
    """Whether the system tells the peak of this process, and forgets it when told so."""
    try:
        _forget_peak()
    except OSError:
        return False
    return _peak() > 0


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def peak_of(program: Callable[[], Any]) -> tuple[Any, int]:
    """What a program returns, and the bytes that it took at its peak beside what there was."""
    trim = heap.libc("malloc_trim")
    if trim is not None:
        trim(0)
    _forget_peak()
    before = resident()
    found = program()
    return found, max(_peak() - before, 0)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """In the body glibc gives back what is freed, in blocks of `BLOCK` bytes and more: what was there before and is
    used again would not count."""
    heap.keep_blocks()
    set_option = heap.libc("mallopt")
    if set_option is None:
        yield
        return
    set_option(heap._MMAP_THRESHOLD, BLOCK)
    try:
        yield
    finally:
        set_option(heap._MMAP_THRESHOLD, heap.LARGEST)


# ---- large samples -------------------------------------------------------------------------------------------------


def _tensors(sample: SampleInput) -> list[torch.Tensor]:
    return [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]


def _nbytes(sample: SampleInput) -> int:
    return sum(t.numel() * t.itemsize for t in _tensors(sample))


def _sizes(sample: SampleInput) -> list[int]:
    """The sizes that may be made larger, and 0 for all of them together."""
    sizes = {n for t in _tensors(sample) for n in t.shape if n > 1}
    return [*sorted(sizes, reverse=True), 0] if sizes else []


def enlarged(sample: SampleInput, size: int, times: int, numbers: bool) -> SampleInput:
    """A sample with all dimensions of one size (0: of any) so many times as long; with `numbers` also whole numbers
    among its arguments that are that size."""

    def change(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.layout is not torch.strided or x.is_nested or x.is_quantized:
                return x
            repeats = [times if n > 1 and size in (0, n) else 1 for n in x.shape]
            if not repeats or max(repeats) == 1:
                return x
            return x.detach().resolve_conj().resolve_neg().repeat(repeats).requires_grad_(x.requires_grad)
        is_size = type(x) is int and x > 1 and size in (0, x)
        return x * times if numbers and is_size else x

    other = copy.copy(sample)
    other.input, other.args, other.kwargs = tree_map(change, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    return other


def _times(sample: SampleInput, size: int, nbytes: int) -> int:
    """How many times as long for so many bytes of arguments, about."""
    exponents = [sum(n > 1 and size in (0, n) for n in t.shape) for t in _tensors(sample)]
    times = 2
    while times < 1 << 24:
        total = sum(t.numel() * t.itemsize * times**e for t, e in zip(_tensors(sample), exponents, strict=True))
        if total >= nbytes:
            break
        times *= 2
    return times


def grown(case: Case, sample: SampleInput) -> Iterator[tuple[SampleInput, int]]:
    """A sample made large in each way that eager takes, until its peak is large enough; and that peak."""
    for size in _sizes(sample):
        for numbers in (False, True):
            found = _grown(case, sample, size, numbers)
            if found is not None:
                yield found
                break


def _grown(case: Case, sample: SampleInput, size: int, numbers: bool) -> tuple[SampleInput, int] | None:
    nbytes = FIRST
    while True:
        large = enlarged(sample, size, _times(sample, size, nbytes), numbers)
        if _nbytes(large) > 4 * LARGEST:
            return None
        program = program_of(case, large)
        began = time.process_time()
        result, peak = peak_of(lambda program=program: outcome(program, None))
        seconds = time.process_time() - began
        if isinstance(result, Exception):
            return None
        del result
        if peak >= ENOUGH:
            return large, peak
        if seconds > SLOW or nbytes >= LARGEST:
            return None
        # Results may be as large as a power of what is given.
        nbytes *= 4 if peak * 16 < ENOUGH and seconds < SLOW / 16 else 2


# ---- measuring -----------------------------------------------------------------------------------------------------


class _Watch:
    """The regions that are made meanwhile, by what XLA says that they need."""

    def __init__(self) -> None:
        self.most, self.what = 0, ""

    def __enter__(self) -> _Watch:
        before = compiling.AROUND[-1]

        def around(computation: Computation, settings: Any, make: Callable[[], Executable]) -> Executable:
            made = before(computation, settings, make)
            if made.needs > self.most:
                ops = dict.fromkeys(str(node.op).removeprefix("aten.") for node in computation.chosen)
                self.most, self.what = made.needs, ", ".join(itertools.islice(ops, 4))
            return made

        compiling.AROUND.append(around)
        return self

    def __exit__(self, *exc: object) -> None:
        compiling.AROUND.pop()


def measured(case: Case, number: int, large: SampleInput, eager: int) -> Found | Exception:
    """The peak of a large sample here, the second time that it comes; or what it raised."""
    program = program_of(case, large)
    begin_anew()
    with _Watch() as watch:
        first = outcome(program, case.mode)
    if isinstance(first, Exception):
        return first
    del first
    outcome(lambda: [torch.ones(4) * 2], case.mode)  # what is dead is let go of with the next run
    SCRATCH.forget()
    _, here = peak_of(lambda: outcome(program, case.mode))
    most = f"{watch.what}: {watch.most >> 20} MB" if watch.most else ""
    shapes = " ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in _tensors(large))
    return Found(case, number, shapes[:160], eager, here, most)


def _chosen(samples: Sequence[SampleInput], limit: int) -> list[int]:
    """Some samples: the largest, and others from all over."""
    places = {max(range(len(samples)), key=lambda i: _nbytes(samples[i]))} if samples else set()
    places |= {len(samples) * (2 * i + 1) // (2 * limit) for i in range(limit - 1) if samples}
    return sorted(places)


def of_case(case: Case, samples: int, ways: int) -> Iterator[Found | Exception]:
    """What some samples of a case take, each made large in at most so many ways."""
    gc.collect()
    with nothing_kept():
        yield from _of_case(case, samples, ways)


def _of_case(case: Case, samples: int, ways: int) -> Iterator[Found | Exception]:
    torch.manual_seed(0)
    every = list(OPS[case.op].sample_inputs("cpu", case.dtype, requires_grad=case.grad))
    for number in _chosen(every, samples):
        for large, eager in itertools.islice(grown(case, every[number]), ways):
            found = measured(case, number, large, eager)
            if isinstance(found, Found) and found.ratio > BOUND:  # a look of the system's at the wrong moment
                again = peak_of(lambda large=large: outcome(program_of(case, large), None))[1]
                found = measured(case, number, large, max(eager, again))
            yield found


def case_of(name: str, mode: str) -> Case | None:
    """An op with gradients where it has them, in the first dtype that it takes; None where it is not run."""
    if name in UNMEASURED:
        return None
    for dtype in DTYPES:
        found = {c.grad: c for c in cases([name], (dtype,), (mode,), (False, True)) if c.op == name}
        if found:
            case = found.get(True, found[False])
            return None if excluded(case) else case
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.memory", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of op_db; none for all")
    parser.add_argument("--mode", default="strict")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--ways", type=int, default=2, help="in which each is made large")
    parser.add_argument("--shard", default="0/1", help="number/of")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    worst: list[Found] = []
    compared = small = 0
    number, of = map(int, args.shard.split("/"))
    for name in list(OPS)[number::of]:
        if args.names and name not in args.names and OPS[name].name not in args.names:
            continue
        case = case_of(name, args.mode)
        found = [] if case is None else list(of_case(case, args.samples, args.ways))
        those = [f for f in found if isinstance(f, Found)]
        compared, small = compared + bool(those), small + (not those)
        for each in found:
            if isinstance(each, Exception):
                print(f"{name}: {type(each).__name__}: {str(each)[:200]}", flush=True)
        if those:
            most = max(those, key=lambda f: f.ratio)
            print(f"{name}: {most.ratio:.1f} ({most.here >> 20} MB, eager {most.eager >> 20}) sample {most.sample} "
                  f"{most.shapes} | {most.region}", flush=True)  # fmt: skip
            worst += [most] if most.ratio > BOUND else []
        else:
            print(f"{name}: nothing large enough", flush=True)
        load.forget()
        gc.collect()
    print(f"{compared} ops compared, {small} not (no sample that eager takes is large)\n")
    print("| op | of eager's peak | MB here, in eager | the region that takes most |\n|---|---|---|---|")
    for f in sorted(worst, key=lambda f: -f.ratio):
        print(f"| `{f.case.op}` | {f.ratio:.1f} | {f.here >> 20}, {f.eager >> 20} | {f.region} |")
    return int(bool(worst)) if math.isfinite(BOUND) else 0


if __name__ == "__main__":
    sys.exit(main())
