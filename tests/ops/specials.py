"""Samples of torch's op corpus with special values in place of their numbers, and what must then be as in eager.

`python -m tests.ops.special_sweep --dtypes float64` runs them, and counts what differs and what accepts it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from .corpus import (
    OPS,
    Case,
    begin_anew,
    broken_row,
    changed,
    is_as_good,
    nudged,
    program_of,
    summary,
    tolerances,
    widened,
)
from .exclusions import UNWRITTEN
from .outcomes import difference, is_float, outcome, short
from .special_exclusions import ACCEPTED, INFINITE, Accepted
from .special_patterns import NAN, filled, seeds

NO_NAN = ("hides NaN", "infinite for NaN")


@dataclass(frozen=True)
class Difference:
    """What differs: `kind` is one of those that `special_exclusions` may accept, or "" where nothing does."""

    kind: str = ""
    text: str = ""


def compare(
    want: Any,
    got: Any,
    tolerance: dict[str, float],
    others: Sequence[list[Any]] = (),
    flushed: list[Any] | None = None,
) -> Difference:
    """NaN where eager has it, infinities of its signs, finite numbers within the tolerance, zeros of its signs.

    `others` are what else eager makes of the same numbers (None where that is nothing): each number may be as in one
    of them, but for its NaN. `flushed` is what it makes of them where it flushes subnormals, as is promised of us.
    """
    if isinstance(want, Exception) or isinstance(got, Exception):
        same = type(want) is type(got)
        return Difference() if same else Difference("raises", f"eager: {short(want)}\n  here: {short(got)}")
    looks = difference(want, got, tolerance, values=False, strides=False)
    if looks:
        return Difference("looks", looks)
    worst: dict[str, str] = {}
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if not isinstance(a, torch.Tensor) or a.layout is not torch.strided or a.is_nested or not a.numel():
            continue
        flush = _agreeing(flushed[i] if flushed else None, b, tolerance)
        fine = torch.stack([flush, *(_agreeing(other[i], b, tolerance) for other in others)]).any(0)
        for kind, bad in _bad(a.detach(), b.detach(), tolerance):
            bad = bad & ~(flush if kind in NO_NAN else fine)
            if bad.any():
                at = tuple(bad.nonzero()[0].tolist())
                worst.setdefault(kind, f"result {i} of {len(want)} at {at}: {b[at].item()} instead of {a[at].item()}")
    # Any one of these is more than the next.
    for kind in ("hides NaN", "infinite for NaN", "makes NaN", "infinite", "values", "sign of zero"):
        if kind in worst:
            return Difference(kind, worst[kind])
    return Difference()


def _agreeing(a: Any, b: torch.Tensor, tolerance: dict[str, float]) -> torch.Tensor:
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return torch.zeros(b.shape, dtype=torch.bool)
    return ~torch.stack([mask for _, mask in _bad(a.detach(), b.detach(), tolerance)]).any(0)


def _bad(a: torch.Tensor, b: torch.Tensor, tolerance: dict[str, float]) -> Iterator[tuple[str, torch.Tensor]]:
    if a.dtype.is_floating_point and a.dtype.itemsize < 2:
        a, b = a.float(), b.float()
    default = torch.testing._comparison.default_tolerances(a.dtype)
    rtol, atol = max(default[0], tolerance["rtol"]), max(default[1], tolerance["atol"])
    if a.is_complex():
        # C's rules for infinite complex numbers are not kept by anybody: where eager's is infinite, ours may be NaN.
        yield "hides NaN", a.isnan() & b.isfinite()
        yield "infinite for NaN", a.isnan() & b.isinf() & ~b.isnan()  # one part may be either
        yield "makes NaN", a.isfinite() & b.isnan()
        yield "infinite", a.isfinite() & b.isinf() & ~b.isnan()
        x, y = (t.to(torch.complex128) for t in (a, b))
        yield "values", a.isfinite() & b.isfinite() & ~((x - y).abs() <= atol + rtol * x.abs())
        return
    if not a.dtype.is_floating_point:
        yield "values", a != b
        return
    yield "hides NaN", a.isnan() & b.isfinite()
    yield "infinite for NaN", a.isnan() & b.isinf()
    yield "makes NaN", b.isnan() & ~a.isnan()
    numbers = ~a.isnan() & ~b.isnan()
    yield "infinite", numbers & (a.isinf() | b.isinf()) & (a != b)
    finite = a.isfinite() & b.isfinite()
    x, y = (t.double() for t in (a, b))
    yield "values", finite & ~((x - y).abs() <= atol + rtol * x.abs())
    yield "sign of zero", (a == 0) & (b == 0) & (a.signbit() != b.signbit())


def accepted(case: Case, pattern: str, kind: str) -> Accepted | None:
    """The row that accepts a difference, if one does."""
    return next((row for row in ACCEPTED if row.covers(OPS[case.op].name, case, pattern, kind)), None)


def check(case: Case, sample: SampleInput, pattern: str) -> Difference:
    """Run a sample with a pattern in it by eager and by the runtime, and say what differs."""
    special, seed = filled(sample, pattern, case.dtype), seeds(pattern)
    begin_anew()
    want = outcome(program_of(case, special, seed), None)
    got = outcome(program_of(case, special, seed), case.mode)
    tolerance = tolerances(OPS[case.op], case.dtype)
    found = compare(want, got, tolerance)
    if found.kind and found.kind not in ("raises", "looks"):
        flushed = _flushed(program_of(case, special, seed))
        found = compare(want, got, tolerance, list(_other_ways(case, special, seed, want)), flushed)
    if case.chained and OPS[case.op].name in (*ONE_OF_EQUALS, "msort"):
        return Difference()  # which one it names is computed with, and judged where nothing follows
    if found.kind and OPS[case.op].name in ONE_OF_EQUALS and _names_an_equal(special, want, got, seed):
        return Difference()
    if found.kind and OPS[case.op].name == "msort" and _as_a_set(want, got):
        return Difference()
    if case.op in UNWRITTEN and found.kind not in ("raises", "looks"):
        return Difference()
    if isinstance(want, list) and isinstance(got, list):
        # Where one of them is no number has been judged by now.
        if found.kind == "values" and is_as_good(case, special, *_numbers_of_both(want, got), seed):
            return Difference()
        if found.kind in NO_NAN and not _is_lost(want, got, list(_truths(case, sample, pattern, seed))):
            return Difference("overflows", found.text)
        if found.kind in NO_NAN and not case.dtype.is_complex and _are_independent(case, special, want, got, seed):
            return Difference("infinite for NaN" if _has_infinity_for_nan(want, got) else "independent", found.text)
    infinitely = (*NO_NAN, "overflows", *(("makes NaN", "infinite") if pattern in INFINITE else ()))
    if case.dtype.is_complex and found.kind in infinitely and pattern not in ("nan", "one nan"):
        return Difference("infinite complex", found.text)
    broken = broken_row()
    return Difference("raises", broken) if broken and not found.kind else found


ONE_OF_EQUALS = frozenset({"kthvalue", "topk"})  # (input, k, dim, ...): torch leaves open which of equal ones they name


def _names_an_equal(
    sample: SampleInput, want: Any, got: Any, seed: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Whether a result is eager's, the index of it that of an equal element, and the gradient goes to that one (no
    element is named twice, then)."""
    if isinstance(want, Exception) or isinstance(got, Exception) or not sample.input.ndim:
        return False
    x, (values, indices) = sample.input.detach(), got[:2]
    dim = sample.args[1] if len(sample.args) > 1 else sample.kwargs.get("dim", -1)
    keepdim = values.ndim == x.ndim
    at = indices if keepdim else indices.unsqueeze(dim)

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())

    picked = x.gather(dim, at)
    if not all(same(a, values.detach()) for a in (want[0].detach(), picked if keepdim else picked.squeeze(dim))):
        return False
    incoming = seed(values.detach())
    grad = torch.zeros_like(x).scatter(dim, at, incoming if keepdim else incoming.unsqueeze(dim))
    if (at.sort(dim).values.diff(dim=dim) == 0).any():
        return False
    return not x.is_floating_point() or len(got) < 3 or same(grad, got[2])


def _as_a_set(want: Any, got: Any) -> bool:
    """Whether values are eager's and gradients are, too, but for which of equal elements each goes to."""
    if isinstance(want, Exception) or isinstance(got, Exception) or not want[0].is_floating_point():
        return False
    pairs = [(a.detach().nan_to_num(7.0), b.detach().nan_to_num(7.0)) for a, b in zip(want, got, strict=True)]
    return torch.equal(*pairs[0]) and all(torch.equal(a.flatten().sort()[0], b.flatten().sort()[0]) for a, b in pairs)


def _numbers_of_both(want: list[Any], got: list[Any]) -> tuple[list[Any], list[Any]]:
    """Two lists of results, with NaN where either has no finite number."""
    pairs = [
        [t.masked_fill(~(a.isfinite() & b.isfinite()), NAN) for t in (a, b)]
        if isinstance(a, torch.Tensor) and is_float(a) and a.layout is torch.strided and a.shape == b.shape
        else [a, b]
        for a, b in zip(want, got, strict=True)
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _flushed(program: Callable[[], list[Any]]) -> list[Any] | None:
    if not torch.set_flush_denormal(True):
        return None
    try:
        found = outcome(program, None)
    finally:
        torch.set_flush_denormal(False)
    return None if isinstance(found, Exception) else found


def _other_ways(
    case: Case, sample: SampleInput, seed: Callable[[torch.Tensor], torch.Tensor], want: list[Any]
) -> Iterator[list[Any]]:
    """What eager makes of a sample number by number, and many at a time: its vector code has special cases other than
    the code for what is left over at the end of a row, so what it answers depends on where in memory a number is."""
    tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        shape = None

    def is_plain(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.layout is torch.strided

    def apart(x: Any) -> Any:
        return torch.stack([x.detach()] * 2, -1)[..., 0].requires_grad_(x.requires_grad) if is_plain(x) else x

    def many(x: Any) -> Any:
        if not is_plain(x) or not x.ndim:
            return x
        full = x.detach() if shape is None else x.detach().expand(shape)
        return full.expand(64, *full.shape).contiguous().requires_grad_(x.requires_grad)

    # What indices are multiplied with them is no call that eager checks, nor one that it survives.
    for form in (apart, many) if all(map(is_float, tensors)) else (apart,):
        other = copy.copy(sample)
        other.input, other.args, other.kwargs = tree_map(form, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        found = outcome(program_of(case, other, seed), None)
        if isinstance(found, Exception) or len(found) != len(want):
            continue
        yield [t[0] if form is many and isinstance(t, torch.Tensor) and t.ndim and len(t) else t for t in found]


def _truths(
    case: Case, sample: SampleInput, pattern: str, seed: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[list[Any] | Exception]:
    """What eager makes of a pattern where nothing overflows on the way: in float64. If that is the dtype, with the
    numbers that the pattern has in float32; and with inputs that are other ones in the last places."""
    special = filled(sample, pattern, case.dtype)
    if case.dtype not in (torch.float64, torch.complex128):
        yield outcome(widened(case, special, seed), None)
        return
    yield outcome(program_of(case, narrow_numbers(sample, pattern), seed), None)
    yield outcome(program_of(case, nudged(special, torch.Generator().manual_seed(0)), seed), None)


def narrow_numbers(sample: SampleInput, pattern: str) -> SampleInput:
    """A sample in float64 with what a pattern puts into one in float32."""
    dtypes = {torch.float64: torch.float32, torch.complex128: torch.complex64}

    def cast(to: dict[torch.dtype, torch.dtype]) -> Callable[[Any], Any]:
        def change(x: Any) -> Any:
            plain = isinstance(x, torch.Tensor) and x.layout is torch.strided and x.dtype in to
            return x.detach().to(to[x.dtype]).requires_grad_(x.requires_grad) if plain else x

        return change

    return changed(filled(changed(sample, cast(dtypes)), pattern), cast({b: a for a, b in dtypes.items()}))


def _are_independent(
    case: Case, special: SampleInput, want: list[Any], got: list[Any], seed: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Whether each NaN of eager's that is a number here does not depend on any number of the inputs that is none: it is
    the same whichever numbers are there instead. (Eager multiplies zeros of a padding by them.)"""

    def instead(number: float) -> list[Any] | Exception:
        def change(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and is_float(x) and x.layout is torch.strided:
                return x.detach().masked_fill(~x.detach().isfinite(), number).requires_grad_(x.requires_grad)
            return x

        return outcome(program_of(case, changed(special, change), seed), None)

    others = [instead(number) for number in (0.0, 1.0, -2.5)]
    if any(isinstance(other, Exception) or len(other) != len(want) for other in others):
        return False
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if not isinstance(a, torch.Tensor) or a.layout is not torch.strided or a.is_nested or not is_float(a):
            continue
        lost = a.isnan() & b.isfinite()
        for other in others:
            there = other[i]
            if lost.any() and not torch.allclose(there[lost].to(b.dtype), b[lost], rtol=1e-4, atol=1e-6):
                return False
    return True


def _has_infinity_for_nan(want: list[Any], got: list[Any]) -> bool:
    return any(
        bool((a.isnan() & b.isinf()).any())
        for a, b in zip(want, got, strict=True)
        if isinstance(a, torch.Tensor) and a.layout is torch.strided and not a.is_nested and is_float(a)
    )


def _is_lost(want: list[Any], got: list[Any], truths: list[list[Any] | Exception]) -> bool:
    """Whether a NaN of eager's that is missing here comes from the inputs. The others are differences of numbers that
    have become infinite on the way, or happen to be equal, which the truths do not know."""

    def is_lost_in(truth: list[Any] | Exception) -> bool:
        if isinstance(truth, Exception) or len(truth) != len(want):
            return True
        return any(
            bool((a.isnan() & ~b.isnan() & t.isnan()).any())
            for a, b, t in zip(want, got, truth, strict=True)
            if isinstance(a, torch.Tensor) and a.layout is torch.strided and not a.is_nested and is_float(a)
        )

    return all(map(is_lost_in, truths))


def compared(
    case: Case, samples: int, patterns: tuple[str, ...]
) -> Iterator[tuple[str, str, Difference, Accepted | None]]:
    """Some samples of a case with each pattern: what that is, what differs, and the row that accepts it."""
    torch.manual_seed(0)
    every = list(OPS[case.op].sample_inputs("cpu", case.dtype, requires_grad=case.grad))
    places = sorted({len(every) * (2 * i + 1) // (2 * samples) for i in range(samples)})
    for place in places if len(every) > samples else range(len(every)):
        for pattern in patterns:
            found = check(case, every[place], pattern)
            row = accepted(case, pattern, found.kind) if found.kind else None
            yield pattern, f"sample {place} {summary(every[place])}", found, row


def differences(case: Case, samples: int, patterns: tuple[str, ...]) -> Iterator[tuple[str, Difference]]:
    """What differs in some samples of a case and is not accepted: the pattern and the sample, and the difference."""
    for pattern, sample, found, row in compared(case, samples, patterns):
        if found.kind and row is None:
            yield f"{pattern}, {sample}", found
