"""torch's op corpus through the runtime: values, shapes, dtypes, strides, gradients and errors as in eager.

`make test` runs one sample of each op in float32, fused, with three ops before and after, and the gradients of every
twelfth op; the rest is `make test-full`. `python -m tests.ops` runs any part of it by hand.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fused_eager.tracing import trace

from . import exclusions
from .conftest import TALLY
from .corpus import DTYPES, MODES, OPS, Case, Tally, cases, check_errors, sweep
from .outcomes import difference

TOGETHER = 9  # samples to be compiled together
GROUPS = 26  # tests of this many ops each: the run is the same, its list is shorter
NAMES = list(OPS)
PARTS = [NAMES[i : i + GROUPS] for i in range(0, len(NAMES), GROUPS)]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What one part compiled is not needed by the next."""
    yield
    trace.MEMORY.forget()
    gc.collect()


def _agree(chosen: Iterator[Case], limit: int | None, together: int = 1) -> None:
    tally = Tally()
    sweep(chosen, limit, tally, told=lambda text: None, together=together)
    TALLY.counts.update(tally.counts)
    TALLY.failures.extend(tally.failures)
    assert not tally.failures, "\n".join(f"{case} sample {i}: {text}" for case, i, text in tally.failures)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_one_sample_of_each_op(part: list[str]) -> None:
    _agree(cases(part, chains=(True,)), None, TOGETHER)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_gradients_of_every_twelfth_op(part: list[str]) -> None:
    _agree(cases(part[::12], grads=(True,), chains=(True,)), None, TOGETHER)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_every_sample_forward(part: list[str], dtype: torch.dtype) -> None:
    _agree(cases(part, (dtype,), MODES, chains=(False,)), 10_000)
    _agree(cases(part, (dtype,), ("fused",), chains=(True,)), 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part[0]}-to-{part[-1]}")
def test_every_sample_backward(part: list[str], dtype: torch.dtype) -> None:
    _agree(cases(part, (dtype,), MODES, grads=(True,)), 10_000)
    _agree(cases(part, (dtype,), ("fused",), grads=(True,), chains=(True,)), 10_000)


WITH_ERRORS = [name for name in NAMES if OPS[name].error_inputs_func is not None]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_ERRORS)
def test_error_inputs_raise_the_same_type(name: str, mode: str) -> None:
    if (name, mode) in exclusions.ERRORS or (name, "all") in exclusions.ERRORS:
        pytest.skip(exclusions.ERRORS.get((name, mode), "see exclusions"))
    assert not list(check_errors(name, mode))


def test_every_exclusion_names_an_op() -> None:
    named = {*exclusions.EXCLUDED, *exclusions.UNWRITTEN, *exclusions.STRIDES, *(n for n, _ in exclusions.ERRORS)}
    assert named <= set(OPS)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 3) * 1.001,  # values
        torch.ones(3, 2),  # shape
        torch.ones(2, 3, dtype=torch.float64),  # dtype
        torch.ones(3, 2).t(),  # strides
        torch.ones(2, 3, requires_grad=True),
        1.0,
    ],
)
def test_a_difference_is_seen(other: object) -> None:
    assert difference([torch.ones(2, 3)], [other], {"rtol": 1e-5, "atol": 1e-5})
    assert not difference([torch.ones(2, 3)], [torch.ones(2, 3)], {"rtol": 1e-5, "atol": 1e-5})
