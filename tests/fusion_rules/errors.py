"""Compare what only values reveal: eager's exception against the checks that a lowering asks for.

What is asserted here is traced at once and judged when the test function has ended (`conftest`): all of a test's
lowerings are compiled together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from fused_eager.fusion_rules.lowering import leaves, text_of
from torch._ops import OpOverload

from .harness import Awaited, Results, entered, results_of, to_torch, traced

# What a lowering comes to: its results, or the type and message of its first failing check.
Outcome = tuple[str, str] | list[torch.Tensor]


def eager(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[str, str] | torch.Tensor | list[torch.Tensor]:
    """What eager returns, or the type and message of what it raises."""
    try:
        return op(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        return type(error).__name__, str(error)


def _traced(op: OpOverload, like: Any, args: Any, kwargs: Any) -> Awaited:
    targets = [t for t in leaves([like]) if isinstance(t, torch.Tensor)]
    return traced(op, *entered(op, args, kwargs), targets)


def _outcome(a: Awaited, found: Results | Exception) -> Outcome:
    if isinstance(found, Exception):
        raise found
    results, outcomes = found
    for check, (bad, value) in zip(a.checks, outcomes, strict=True):
        if bad:
            return check.error, text_of(check.message, int(value))
    return [to_torch(r, t) for r, t in zip(results, a.wanted, strict=True)]


def lowered(op: OpOverload, like: Any, *args: Any, **kwargs: Any) -> Outcome:
    """The lowering's outcome, now. `like` is a tensor or list of tensors as eager has the outputs."""
    ((a, found),) = results_of([_traced(op, like, args, kwargs)])
    return _outcome(a, found)


_DUE: dict[Awaited, tuple[str, Callable[[Outcome, list[torch.Tensor]], None]]] = {}


def judged_later(
    op: OpOverload, like: Any, args: Any, kwargs: Any, verdict: Callable[[Outcome, list[torch.Tensor]], None]
) -> None:
    """Have `verdict` look at the lowering's outcome, and at what `like` is now, at the end of the test."""
    caller = sys._getframe(2)
    _DUE[_traced(op, like, args, kwargs)] = f"{caller.f_code.co_filename}:{caller.f_lineno}", verdict


def judge() -> None:
    """Run what is due.

    Raises:
        AssertionError: the first that is not as it should be, with the line that asked for it.
    """
    due = dict(_DUE)
    _DUE.clear()
    for a, found in results_of(list(due)):
        where, verdict = due[a]
        try:
            verdict(_outcome(a, found), a.wanted)
        except Exception as error:
            raise AssertionError(f"{where}, {a.op}: {error}") from error


def forget() -> None:
    """A test has failed: what it has asked for is not run."""
    _DUE.clear()


def assert_same_error(op: OpOverload, like: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Eager raises, and the lowering asks for that exception with that message."""
    want = eager(op, *args, **kwargs)
    assert isinstance(want, tuple), f"eager does not raise: {want}"

    def compare(got: Outcome, wanted: list[torch.Tensor]) -> None:
        assert got == want

    judged_later(op, like, args, kwargs, compare)


def assert_same(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Eager and the lowering agree, and no check fails."""
    want = eager(op, *args, **kwargs)
    assert isinstance(want, (torch.Tensor, list, tuple)) and not (isinstance(want, tuple) and isinstance(want[0], str))

    def compare(got: Outcome, wanted: list[torch.Tensor]) -> None:
        assert isinstance(got, list), f"a check fails: {got}"
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, check_stride=False)

    judged_later(op, want, args, kwargs, compare)


def assert_same_bits(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Eager and the lowering agree to the last bit."""
    want = eager(op, *args, **kwargs)
    assert isinstance(want, torch.Tensor)

    def compare(got: Outcome, wanted: list[torch.Tensor]) -> None:
        assert isinstance(got, list), f"a check fails: {got}"
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True, check_stride=False)

    judged_later(op, want, args, kwargs, compare)


def assert_keeps_nan(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Wherever eager has NaN the lowering has it, whatever it has elsewhere."""
    want = eager(op, *args, **kwargs)

    def compare(got: Outcome, wanted: list[torch.Tensor]) -> None:
        assert isinstance(got, list), f"a check fails: {got}"
        for a, b in zip(got, wanted, strict=True):
            assert not (b.isnan() & ~a.isnan()).any(), f"{a} instead of {b}"

    judged_later(op, want, args, kwargs, compare)
