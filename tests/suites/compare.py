"""Run a program by eager and in a mode, and compare all that it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from tests.ops.outcomes import as_near, difference, outcome, short

T = TypeVar("T")
Program = Callable[[], list[Any]]
# A gradient is a sum over the steps of a recurrence and over rounds, each with the rounding of a tanh (4 ulps in XLA).
ULPS = 32.0


def spread(variants: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of the variants, from all over them."""
    return variants[:: -(-len(variants) // most) or 1]


def check(make: Callable[[torch.dtype], Program], dtype: torch.dtype, mode: str) -> str:
    """How a program differs in a mode from eager; "" if it does not. `make` makes it for a dtype.

    Where it differs by more than the tolerance, what decides is whether it is about as near as eager to what float64
    gives.
    """
    want, got = outcome(make(dtype), None), outcome(make(dtype), mode)
    if isinstance(want, Exception) or isinstance(got, Exception):
        return "" if type(want) is type(got) else f"eager: {short(want)}\n  here: {short(got)}"
    rtol, atol = torch.testing._comparison.default_tolerances(dtype)
    found = difference(want, got, {"rtol": rtol, "atol": atol})
    if found.startswith("values") and dtype is not torch.float64:
        truth = outcome(make(torch.float64), None)
        if isinstance(truth, list) and as_near(want, got, truth, ULPS):
            return ""
    return found


def assert_all_agree(
    programs: Iterable[tuple[object, Callable[[torch.dtype], Program]]], dtype: torch.dtype, mode: str
) -> None:
    """Fail with each of the programs that differs, by its name, and how."""
    failures = [f"{name}: {text}" for name, make in programs if (text := check(make, dtype, mode))]
    assert not failures, "\n".join(failures)
