"""Run torch's own op corpus (op_db) through the runtime and compare it with eager.

A *case* is one OpInfo, dtype, mode, and whether the sample is run with gradients and inside a chain of other ops.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fused_eager.fusion_rules.lowering import LoweringError
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from fused_eager.executing import load
from fused_eager.policy import hotness
from tests.op_db import OP_DB

from .exclusions import EXCLUDED, STRIDES, UNWRITTEN
from .outcomes import as_near, difference, is_float, outcome, own, short

OPS: dict[str, OpInfo] = {info.formatted_name: info for info in OP_DB}
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int32, torch.uint8,
    torch.bool,
)
MODES = ("debug", "strict", "fused")
# The tests of torch's that compare one implementation with another on a CPU: their tolerances are ours.
_COMPARISONS = frozenset({"TestCommon", "TestInductorOpInfo", "TestDecomp", "TestConsistency", None})


@dataclass(frozen=True)
class Case:
    """How to run the samples of one op."""

    op: str
    dtype: torch.dtype
    mode: str = "fused"
    grad: bool = False
    chained: bool = False

    def __str__(self) -> str:
        how = [str(self.dtype).removeprefix("torch."), self.mode]
        return "-".join([self.op, *how, *(["backward"] if self.grad else []), *(["chained"] if self.chained else [])])


@dataclass
class Tally:
    """What a run of cases came to; `failures` are (case, sample number, text)."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Case, int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        c = self.counts
        return (
            f"{c['samples']} samples of {c['cases']} cases agree with eager but for {len(self.failures)}; "
            f"{c['refused']} refused by both, {c['ill-conditioned']} ill-conditioned (as near to float64 as eager), "
            f"{c['excluded']} cases excluded"
        )


def cases(
    names: list[str] | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    modes: tuple[str, ...] = ("fused",),
    grads: tuple[bool, ...] = (False,),
    chains: tuple[bool, ...] = (False,),
) -> Iterator[Case]:
    """All cases of the named ops (None: all of op_db) that op_db says eager supports."""
    for name, info in OPS.items():
        if names and name not in names and info.name not in names:
            continue
        for dtype in dtypes:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            for grad in grads:
                if grad and not (info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")):
                    continue
                for mode in modes:
                    for chained in chains:
                        yield Case(name, dtype, mode, grad, chained)


def tolerances(info: OpInfo, dtype: torch.dtype) -> dict[str, float]:
    """The widest tolerance that torch's own comparisons on CPUs use for this op and dtype, else torch's default."""
    rtol, atol = torch.testing._comparison.default_tolerances(dtype)
    for decorator in info.decorators:
        if isinstance(decorator, DecorateInfo):
            if decorator.cls_name not in _COMPARISONS or decorator.device_type not in (None, "cpu"):
                continue
            inner = decorator.decorators
        else:
            inner = [decorator]
        for override in inner:
            if isinstance(override, toleranceOverride) and dtype in override.d:
                found = override.d[dtype]
                rtol, atol = max(rtol, found.rtol), max(atol, found.atol)
    return {"rtol": rtol, "atol": atol}


# ---- running a sample ----------------------------------------------------------------------------------------------


def before(t: torch.Tensor) -> torch.Tensor:
    """Three ops that change nothing but who made the tensor."""
    if t.layout is not torch.strided or t.is_quantized or t.is_nested or type(t) is torch.nn.Parameter:
        return t
    if t.dtype is torch.bool:
        return t.logical_not().logical_not().logical_or(torch.zeros((), dtype=torch.bool))
    return t.mul(2).mul(0.5).neg().neg() if is_float(t) else t.add(1).sub(1).bitwise_or(0)


def after(t: torch.Tensor) -> torch.Tensor:
    """Three ops on a result."""
    if t.layout is not torch.strided or t.is_quantized or t.is_nested:
        return t
    if t.dtype is torch.bool:
        return t.logical_not().logical_xor(torch.ones((), dtype=torch.bool)).logical_or(False)
    return t.neg().mul(1.5).sub(0.25) if is_float(t) else t.add(1).mul(2).sub(3)


def run(
    info: OpInfo,
    sample: SampleInput,
    grad: bool,
    chained: bool,
    seed: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like,
) -> Callable[[], list[Any]]:
    """A function that runs a sample once: its results, its gradients, and what it has left in its arguments.

    `seed` makes the gradient that comes in for a result.
    """
    arguments = own([sample.input, list(sample.args), dict(sample.kwargs)])
    given = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]

    def program() -> list[Any]:
        torch.manual_seed(1)
        first, args, kwargs = tree_map(lambda x: before(x) if isinstance(x, torch.Tensor) else x, arguments) \
            if chained else arguments
        out = info.op(first, *args, **kwargs)
        results = tree_leaves(sample.output_process_fn_grad(out) if grad else out)
        if chained:
            results = [after(t) if isinstance(t, torch.Tensor) else t for t in results]
        gradients: list[Any] = []
        if grad:
            ends = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            starts = [t for t in given if t.requires_grad]
            if ends and starts:
                seeds = [seed(t) for t in ends]
                gradients = list(torch.autograd.grad(ends, starts, seeds, allow_unused=True))
        return [*results, *gradients, *given]

    return program


def begin_anew() -> None:
    # Each sample is one more shape of the same stream, which would soon be left to ATen.
    hotness.SKELETONS.variants.clear()


def check(case: Case, sample: SampleInput) -> str:
    """Run a sample by eager and by the runtime; returns "" if all agrees and no row has broken its contract, which
    would make an island of its op.

    "refused" if both refuse it alike, "ill-conditioned" if they differ by what eager itself is off.
    """
    begin_anew()
    want, got = outcome(program_of(case, sample), None), outcome(program_of(case, sample), case.mode)
    if isinstance(want, Exception) or isinstance(got, Exception):
        if type(want) is type(got):
            return "refused"
        return f"eager: {short(want)}\n  here: {short(got)}"
    found = _difference(case, want, got)
    if found.startswith("values") and is_as_good(case, sample, want, got):
        return "ill-conditioned"
    return found or broken_row()


def program_of(
    case: Case, sample: SampleInput, seed: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like
) -> Callable[[], list[Any]]:
    return run(OPS[case.op], sample, case.grad, case.chained, seed)


def _difference(case: Case, want: list[Any], got: list[Any]) -> str:
    bounds = tolerances(OPS[case.op], case.dtype)
    return difference(want, got, bounds, case.op not in UNWRITTEN, case.op not in STRIDES)


def broken_row() -> str:
    return next((why for why in load.ISLANDS.values() if LoweringError.__name__ in why), "")


Task = tuple[Case, int, SampleInput]  # a case, and the number and sample of it


def check_together(tasks: Sequence[Task]) -> Iterator[tuple[Task, str]]:
    """What `check` says of samples of one mode, run as one program: compiling one takes a fraction of what all do.

    Whichever differs, or raises, is run by itself: whatever that shows, that it does so among others is a failure.
    """
    begin_anew()
    wanted = [outcome(program_of(case, sample), None) for case, _, sample in tasks]
    # Over arguments of their own: what a program has left in them is compared as well.
    lasting = [task for task, want in zip(tasks, wanted, strict=True) if not isinstance(want, Exception)]
    programs = [program_of(case, sample) for case, _, sample in lasting]
    got = outcome(lambda: [program() for program in programs], tasks[0][0].mode)
    broken = f"among others: {short(got)}" if isinstance(got, Exception) else broken_row()
    found = iter([] if broken else got)
    for task, want in zip(tasks, wanted, strict=True):
        case, _, sample = task
        if isinstance(want, Exception):
            yield task, check(case, sample)
        elif broken:
            text = check(case, sample)
            yield task, broken if text in ("", "refused", "ill-conditioned") else text
        elif text := _difference(case, want, next(found)):
            yield task, check(case, sample) or f"among others: {text}"
        else:
            yield task, ""


NUDGES = 32  # times that all inputs are moved by a unit in the last place, to see how far that moves eager's results
_WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
         torch.complex64: torch.complex128}


def widened(
    case: Case, sample: SampleInput, seed: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like
) -> Callable[[], list[Any]]:
    """The program of a sample in float64, with the gradients that would come in without that."""

    def narrow_seed(t: torch.Tensor) -> torch.Tensor:
        if t.dtype not in _WIDE.values():
            return seed(t)
        if t.is_complex() == case.dtype.is_complex:
            return seed(t.to(case.dtype)).to(t.dtype)
        return seed(t.to(torch.complex64 if t.is_complex() else torch.float32)).to(t.dtype)

    def widen(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in _WIDE and x.layout is torch.strided:
            return x.detach().to(_WIDE[x.dtype]).requires_grad_(x.requires_grad)
        return _WIDE.get(x, x) if isinstance(x, torch.dtype) else x

    return program_of(case, changed(sample, widen), narrow_seed)


def changed(sample: SampleInput, change: Callable[[Any], Any]) -> SampleInput:
    other = copy.copy(sample)
    other.input, other.args, other.kwargs = tree_map(change, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    return other


def is_as_good(
    case: Case,
    sample: SampleInput,
    want: list[Any],
    got: list[Any],
    seed: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like,
) -> bool:
    """Where eager itself is off by more than the tolerance: whether our results are about as near to float64's.

    (1 - x^2)^-1/2 near 1, say. Measured in the largest error of each result; where eager is nearer by luck, in that of
    eager for inputs that are other ones in the last place.
    """
    if case.dtype not in _WIDE:
        return False

    truth, generator = outcome(widened(case, sample, seed), None), torch.Generator().manual_seed(0)
    if isinstance(truth, Exception):
        return False
    if as_near(want, got, truth):
        return True
    moved = (outcome(program_of(case, nudged(sample, generator), seed), None) for _ in range(NUDGES))
    return as_near(want, got, truth, nudged=[each for each in moved if not isinstance(each, Exception)])


def nudged(sample: SampleInput, generator: torch.Generator) -> SampleInput:
    """A sample whose numbers are other ones in the last place, or in float64 in the last two digits."""

    def nudge(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and is_float(x) and x.layout is torch.strided:
            eps = torch.finfo(x.dtype).eps
            if x.dtype in _WIDE:
                signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
                moved = x.detach() * (1 + signs * eps / 2)
            else:  # so far that what happens to be equal is equal no more
                moved = x.detach() * (1 + torch.randint(-64, 65, x.shape, generator=generator).double() * eps)
            return moved.to(x.dtype).requires_grad_(x.requires_grad)
        return x

    return changed(sample, nudge)


def middle(samples: Iterator[SampleInput]) -> list[tuple[int, SampleInput]]:
    """One sample that stands for the rest: the first is often the plainest, the later ones have the options."""
    found = list(enumerate(samples))
    return found[len(found) // 2 :][:1]


def sweep(
    chosen: Iterator[Case],
    limit: int | None,
    tally: Tally,
    told: Callable[[str], None] = print,
    together: int = 1,
) -> Tally:
    """Run the samples of the chosen cases: at most `limit` of each; None for one that stands for the rest.

    With `together` so many are run as one program; they have to be of one mode.
    """
    tasks = _tasks(chosen, limit, tally)
    while some := list(itertools.islice(tasks, together)):
        checked = check_together(some) if together > 1 else [(some[0], check(some[0][0], some[0][2]))]
        for (case, i, sample), text in checked:
            tally.counts["samples"] += 1
            if text in ("refused", "ill-conditioned"):
                tally.counts[text] += 1
            elif text:
                tally.failures.append((case, i, text))
                told(f"FAIL {case} sample {i} {summary(sample)}\n  {text}")
    return tally


def _tasks(chosen: Iterator[Case], limit: int | None, tally: Tally) -> Iterator[Task]:
    for case in chosen:
        info = OPS[case.op]
        if excluded(case):
            tally.counts["excluded"] += 1
            continue
        tally.counts["cases"] += 1
        torch.manual_seed(0)
        samples = info.sample_inputs("cpu", case.dtype, requires_grad=case.grad)
        for i, sample in middle(samples) if limit is None else itertools.islice(enumerate(samples), limit):
            yield case, i, sample


def summary(sample: SampleInput) -> str:
    def show(x: Any) -> Any:
        return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else x

    return str(tree_map(show, [sample.input, list(sample.args), sample.kwargs]))[:200]


def excluded(case: Case) -> str:
    """Why a case is not run; "" if it is."""
    return EXCLUDED.get(case.op, "")


ABOUT_VALUES = frozenset({"gather", "scatter", "scatter_add"})  # an index out of range raises at the next sync


def check_errors(name: str, mode: str) -> Iterator[str]:
    """Run an op's error inputs: a text for each that does not raise eager's exception, and that at its own line, unless
    it is about values."""
    info = OPS[name]
    if info.error_inputs_func is None:
        return
    for i, wrong in enumerate(info.error_inputs("cpu")):
        sample = wrong.sample_input
        begin_anew()
        want = outcome(run(info, sample, False, False), None)
        got = outcome(run(info, sample, False, False), mode)
        if not isinstance(want, Exception):
            continue
        told = str(got).partition(" (raised by ")[0] if name in ABOUT_VALUES else str(got)
        if type(want) is not type(got) or str(want) != told:
            yield f"error input {i} {summary(sample)}: eager: {short(want)}\n  here: {short(got)}"
