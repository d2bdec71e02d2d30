"""Lower one op: by its row, or else through torch's decomposition of it."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from .decompose import lower_by_decomposition
from .deferred import jax
from .lowering import Check, Context, NoLowering, Places, apply_rule, conform, leaves
from .platforms import Variants
from .rule import rule_for
from .spec import Spec

LACKING: Variants[tuple[str, ...]] = Variants(
    "dtypes that no op is lowered for", any=(), tpu=("complex128",), why="XLA's compiler for TPUs ends its process"
)


def lower(
    op: OpOverload,
    args: Any,
    kwargs: dict[str, Any],
    out: tuple[Spec, ...],
    bounds: bool = True,
    places: Places | None = None,
) -> tuple[tuple[jax.Array, ...], list[Check]]:
    """Lower one functional overload.

    Args:
        op: a functional overload (see `functional_twin`).
        args, kwargs: its arguments, with JAX arrays for tensors and `Hoisted` for hoisted numbers.
        out: specs of its outputs, in order; outputs that are None or absent are not counted.
        bounds: whether checks are wanted.
        places: how the arguments lie in memory, where that is known.

    Returns:
        One array per output spec, and the checks that the caller has to evaluate.

    Raises:
        NoLowering: there is no way to lower it; run it as an island.
    """
    _refuse_lacking(args, kwargs, out)
    cx = Context(out, bounds=bounds, places=places or Places())
    rule = rule_for(op)
    if rule is None:
        results = lower_by_decomposition(op, args, kwargs, cx)
    else:
        results = apply_rule(rule, cx, args, kwargs)
    return conform(str(op), results, out), cx.checks


def _refuse_lacking(args: Any, kwargs: dict[str, Any], out: tuple[Spec, ...]) -> None:
    lacking = LACKING.here
    if not lacking:
        return
    dtypes = {str(leaf.dtype) for leaf in leaves([args, kwargs]) if hasattr(leaf, "dtype")}
    dtypes |= {str(spec.dtype).removeprefix("torch.") for spec in out}
    for dtype in lacking:
        if dtype in dtypes:
            raise NoLowering(f"XLA has no {dtype} on this platform")
