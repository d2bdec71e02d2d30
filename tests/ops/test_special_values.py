"""Special values (zeros, infinities, NaN, equal rows, the largest and the smallest numbers) in torch's op corpus.

`make test` runs a part of the ops in float32, with gradients; the rest is `make test-full`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from fused_eager.tracing import trace

from .corpus import OPS
from .special_exclusions import ACCEPTED, KINDS, UNRUN
from .special_patterns import PATTERNS, WHOLE, filled, patterns_of
from .special_sweep import cases_of, patterns_to_run
from .specials import compare, differences

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
WHOLES = (torch.int64, torch.int32, torch.uint8, torch.bool)
QUICK = ("inf", "nan", "one nan", "equal rows", "cycle", "pairs")  # what most faults showed in
# Products and sums on the way (`t * 2 * 0.5`, `-r * 1.5 - 0.25`) keep all of these apart, but not the largest numbers.
FUSED = ("zeros", "ones", "inf", "-inf", "nan", "one nan", "one inf", "one -inf", "equal rows", "ties", "pairs")
NAMES = list(OPS)
GROUPS = 8
PARTS = [NAMES[i : i + GROUPS] for i in range(0, len(NAMES), GROUPS)]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What one part compiled is not needed by the next."""
    yield
    trace.MEMORY.forget()
    gc.collect()


def _agree(
    names: list[str], dtype: torch.dtype, mode: str, samples: int, patterns: tuple[str, ...], chained: bool = False
) -> None:
    found = [
        f"{case}: {where}: {difference.kind}: {difference.text}"
        for case in cases_of(names, dtype, mode, chained)
        for where, difference in differences(case, samples, patterns_to_run(case, patterns))
    ]
    assert not found, "\n".join(found)


@pytest.mark.thinned(48)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_a_sample_of_each_op(part: list[str]) -> None:
    _agree(part, torch.float32, "strict", 1, QUICK)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_no_elements(part: list[str]) -> None:
    _agree(part, torch.float32, "fused", 1, ("no elements",))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("dtype", DTYPES + WHOLES, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_every_pattern(part: list[str], dtype: torch.dtype, mode: str) -> None:
    _agree(part, dtype, mode, 3, patterns_of(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_every_pattern_among_other_ops(part: list[str], dtype: torch.dtype) -> None:
    """In a region with three pointwise ops before and after, with which XLA fuses it."""
    _agree(part, dtype, "fused", 1, FUSED, chained=True)


LATER = {"native_group_norm", "nn.functional.linear_cross_entropy"}  # torch 2.11's corpus has not


def test_no_row_accepts_a_hidden_nan() -> None:
    named = {info.name for info in OPS.values()}
    for row in ACCEPTED:
        assert set(row.kinds) <= KINDS and "hides NaN" not in KINDS
        assert set(row.patterns) <= {*PATTERNS, *WHOLE, "*"}
        assert set(row.ops) <= {*named, *LATER, "*"} and row.reason
    assert named >= {op for op, _ in UNRUN}


@pytest.mark.parametrize(
    ("eager", "here", "kind"),
    [
        (torch.nan, 1.0, "hides NaN"),
        (torch.nan, torch.inf, "infinite for NaN"),
        (1.0, torch.nan, "makes NaN"),
        (torch.inf, -torch.inf, "infinite"),
        (torch.inf, 3e38, "infinite"),
        (1.0, 1.1, "values"),
        (0.0, -0.0, "sign of zero"),
    ],
)
def test_a_difference_is_seen(eager: float, here: float, kind: str) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    assert compare([torch.tensor([2.0, eager])], [torch.tensor([2.0, here])], tolerance).kind == kind
    assert not compare([torch.tensor([2.0, eager])], [torch.tensor([2.0, eager])], tolerance).kind


def test_a_complex_number_that_is_both_infinite_and_no_number_agrees_with_itself() -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    both, one = (torch.tensor([complex(-torch.inf, x)]) for x in (torch.nan, 1.0))
    assert not compare([both], [both], tolerance).kind
    assert compare([both], [one], tolerance).kind == "infinite for NaN"


def test_whole_numbers_are_filled_where_they_are_of_the_dtype() -> None:
    sample = SampleInput(torch.tensor([3, 4, 5], dtype=torch.int32), args=(torch.tensor([2, 0, 1]), torch.rand(3)))
    largest = filled(sample, "largest", torch.int32)
    assert largest.input.tolist() == [2**31 - 1] * 3 and largest.args[0].tolist() == [2, 0, 1]
    assert filled(sample, "lowest").input.tolist() == [3, 4, 5]
