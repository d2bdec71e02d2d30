"""Compare what only values reveal: eager's exception against the checks that a lowering asks for."""

from __future__ import annotations

from typing import Any

import jax
import torch
from fused_eager.fusion_rules.lowering import Check, Hoisted, leaves, lower, map_leaves
from fused_eager.fusion_rules.rule import hoisted_names
from fused_eager.fusion_rules.spec import Spec, spec_of
from torch._ops import OpOverload

from fused_eager.xla import enable_x64

from .harness import to_jax, to_torch


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
    specs: tuple[Spec, ...] = tuple(spec_of(t) for t in targets)
    holes = hoisted_names(op)
    names = [a.name for a in op._schema.arguments]
    traced: list[Any] = []

    def enter(name: str, value: Any) -> Any:
        def leaf(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                traced.append(to_jax(x))
            elif name in holes and type(x) in (int, float):
                traced.append(Hoisted(jax.numpy.asarray(x, jax.numpy.float64 if type(x) is float else None), type(x)))
            else:
                return x
            return _Slot(len(traced) - 1)

        return map_leaves(leaf, value)

    checks: list[Check] = []
    with enable_x64(True):
        slots = [enter(n, v) for n, v in zip(names, args, strict=False)]
        named = {k: enter(k, v) for k, v in kwargs.items()}

        def run(values: list[Any]) -> Any:
            def fill(x: Any) -> Any:
                return values[x.number] if isinstance(x, _Slot) else x

            results, found = lower(op, [map_leaves(fill, a) for a in slots],
                                   {k: map_leaves(fill, v) for k, v in named.items()}, specs)
            checks[:] = found
            return results, [(c.bad, c.value) for c in found]

        results, outcomes = jax.jit(run)(traced)
    for check, (bad, value) in zip(checks, outcomes, strict=True):
        if bad:
            return check.error, check.message.format(value=int(value))
    return [to_torch(r, t) for r, t in zip(results, targets, strict=True)]


class _Slot:
    """The place of a traced value among the arguments."""

    def __init__(self, number: int):
        self.number = number


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
