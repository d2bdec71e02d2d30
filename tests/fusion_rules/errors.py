"""Compare what only values reveal: eager's exception against the checks that a lowering asks for."""

from __future__ import annotations

from typing import Any

import torch
from fused_eager.fusion_rules.lowering import leaves
from torch._ops import OpOverload

from .harness import call, entered, to_torch


def eager(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[str, str] | torch.Tensor | list[torch.Tensor]:
    """What eager returns, or the type and message of what it raises."""
    try:
        return op(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        return type(error).__name__, str(error)


def lowered(op: OpOverload, like: Any, *args: Any, **kwargs: Any) -> tuple[str, str] | list[torch.Tensor]:
    """The lowering's results, as eager's `like` has them, or the type and message of its first failing check.

    `like` is a tensor or list of tensors with the outputs' specs.
    """
    targets = [t for t in leaves([like]) if isinstance(t, torch.Tensor)]
    results, checks = call(op, *entered(op, args, kwargs), targets)
    for check, bad, value in checks:
        if bad:
            return check.error, check.message.format(value=int(value))
    return [to_torch(r, t) for r, t in zip(results, targets, strict=True)]


def assert_same_error(op: OpOverload, like: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Eager raises, and the lowering asks for that exception with that message."""
    want = eager(op, *args, **kwargs)
    assert isinstance(want, tuple), f"eager does not raise: {want}"
    assert lowered(op, like, *args, **kwargs) == want


def assert_same(op: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Eager and the lowering agree, and no check fails."""
    want = eager(op, *args, **kwargs)
    assert isinstance(want, (torch.Tensor, list, tuple)) and not (isinstance(want, tuple) and isinstance(want[0], str))
    got = lowered(op, want, *args, **kwargs)
    assert isinstance(got, list), f"a check fails: {got}"
    for a, b in zip(got, leaves([want]), strict=True):
        torch.testing.assert_close(a, b.resolve_conj().resolve_neg(), equal_nan=True, check_stride=False)
