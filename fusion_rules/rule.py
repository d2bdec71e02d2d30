"""The table of lowerings: one `Rule` per ATen overload, entered by the family modules.

Only functional overloads have rows. In-place and `out=` overloads find the row of their functional twin through
`functional_twin`, so a rule is written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promote

from . import families, platforms

Lowering = Callable[..., Any]


class OpClass(str, Enum):
    """What an op does to memory: the only thing that the named fusion rules look at."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    CONTRACTION = "contraction"  # matmul family
    CONVOLUTION = "convolution"
    WINDOW = "window"  # pooling, interpolation
    NORMALIZATION = "normalization"  # statistics, then pointwise
    SCAN = "scan"  # cumulative ops
    SHAPE = "shape"  # moves elements: cat, pad, flip, copy
    GATHER = "gather"
    SCATTER = "scatter"
    FACTORY = "factory"
    SORT = "sort"
    LINALG = "linalg"
    FFT = "fft"
    OPTIMIZER = "optimizer"  # foreach and fused optimizer steps
    COLLECTIVE = "collective"  # of several ranks' devices
    COMPOSITE = "composite"  # lowered through torch's own decomposition


# Ops whose kernels refuse some values: an index out of range, a matrix that has no factor.
_RAISING = (OpClass.GATHER, OpClass.SCATTER, OpClass.LINALG)

# Ops that ATen has kernels for, written by hand, that compiled loops may not reach: who runs them is measured.
AUTOTUNED = frozenset(
    {
        OpClass.CONTRACTION,
        OpClass.CONVOLUTION,
        OpClass.WINDOW,
        OpClass.SCAN,
        OpClass.SCATTER,
        OpClass.SORT,
        OpClass.FFT,
    }
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one ATen overload is lowered to JAX.

    `lower(cx, *args, **kwargs)` takes the overload's own arguments, with JAX arrays for tensors and 0-d arrays for
    hoisted scalars, and returns an array or a tuple of arrays, one for each output. With `promote`, tensors and
    scalars arrive already converted to torch's computation dtype. The caller converts results to `cx.out` dtypes.

    `keep` names schema arguments of type Scalar that stay Python numbers (an exponent, a dimension bound);
    `hoist` names float, int or bool arguments that become inputs of the region although the schema calls them
    attributes (a learning rate). Every other Scalar is hoisted, everything else is structural.

    `may_raise` says that eager refuses some values, so that the op has to run though nobody reads its result. Only
    such a row may ask for checks.

    `alone`: it is a region by itself, for its last bits would depend on what it is fused with and may not.

    `defines` says that the op is what its row says: there is no kernel of ATen's to be asked what it takes and returns.
    Of this library's own ops (`fused_eager.*`) there is none.

    `own` are the lowerings of the platforms that have one of their own; `lower` is for any other. What else a row says
    holds on every platform: it decides what is recorded, and keys.
    """

    op: str
    cls: OpClass
    lower: Lowering
    promote: Promote | None = None
    keep: frozenset[str] = frozenset()
    hoist: frozenset[str] = frozenset()
    may_raise: bool = False
    alone: bool = False
    note: str = ""
    defines: bool = False
    own: Mapping[str, Lowering] = field(default_factory=dict, hash=False)

    @property
    def here(self) -> Lowering:
        """The lowering for the platform that is lowered for: its own before the one for any."""
        return self.own.get(platforms.current(), self.lower)


RULES: dict[str, Rule] = {}  # filled by `families.load`; `fusion_rules.RULES` has been


def rule(
    ops: str | Iterable[str],
    cls: OpClass,
    *,
    promote: Promote | None = None,
    keep: Iterable[str] = (),
    hoist: Iterable[str] = (),
    may_raise: bool = False,
    alone: bool = False,
    note: str = "",
    defines: bool = False,
    platform: str = platforms.ANY,
) -> Callable[[Lowering], Lowering]:
    """Decorator: enter one lowering for one or several overloads, named without namespace ("add.Tensor") or with.

    >>> @rule("relu.default", OpClass.POINTWISE, promote=Promote.DEFAULT)
    ... def relu(cx, x): ...

    With `platform`, the lowering of that platform alone, of an op whose row for any stands already.

    Raises:
        ValueError: an op has two lowerings for a platform, or none for any; there is no such platform; or the row says
            something else than that for any but how it is lowered.
    """

    def enter(lower: Lowering) -> Lowering:
        for op in [ops] if isinstance(ops, str) else ops:
            name = op if op.count(".") > 1 else f"aten.{op}"
            raising, ours = may_raise or cls in _RAISING, name.startswith("fused_eager.")
            made = Rule(
                name, cls, lower, promote, frozenset(keep), frozenset(hoist), raising, alone, note, defines or ours
            )
            known = RULES.get(name)
            RULES[name] = made if known is None and platform == platforms.ANY else _joined(known, made, platform)
        return lower

    return enter


def _joined(known: Rule | None, made: Rule, platform: str) -> Rule:
    """A row with one more platform's lowering."""
    if platform not in platforms.PLATFORMS and platform != platforms.ANY:
        raise ValueError(f"{made.op}: there is no platform {platform!r}, only {', '.join(platforms.PLATFORMS)}")
    if known is None:
        raise ValueError(f"{made.op} has a lowering for {platform} and none for any platform")
    there = known.lower if platform == platforms.ANY else known.own.get(platform)
    if there is not None:
        raise ValueError(f"{made.op} has two lowerings for {platform}: {there!r} and {made.lower!r}")
    if replace(made, lower=known.lower, note=known.note, own=known.own) != known:
        raise ValueError(f"the row of {made.op} for {platform} differs in more than its lowering from that for any")
    return replace(known, own={**known.own, platform: made.lower})


# In-place ops that do not look at what they overwrite, by the names of their schemas.
OVERWRITERS = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


def _plain(argument: torch.Argument) -> tuple[str, str]:
    return argument.name, str(argument.type)


@functools.cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """The functional overload that computes what `op` writes: itself, or `add.Tensor` for `add_.Tensor` and `add.out`.

    None where ATen has no such overload.
    """
    schema = op._schema
    if not schema.is_mutable:
        return op
    namespace, _, base = schema.name.partition("::")
    wanted = [_plain(a) for a in schema.arguments if not a.is_out]
    names = [base] if any(a.is_out for a in schema.arguments) else [base.removesuffix("_"), base, f"{base}_functional"]
    for name in names:
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            candidate = getattr(packet, overload)
            if not candidate._schema.is_mutable and [_plain(a) for a in candidate._schema.arguments] == wanted:
                return candidate
    return None


@functools.cache
def rule_for(op: OpOverload | None) -> Rule | None:
    """The row for an overload or for its functional twin; None if it has to be decomposed or run as an island, and for
    the twin of an op that has none.
    """
    families.load()
    twin = None if op is None else functional_twin(op)
    return None if twin is None else RULES.get(str(twin))


@functools.cache
def hoisted_names(op: OpOverload) -> frozenset[str]:
    """The arguments of `op` whose Python numbers are inputs of a region instead of constants in it.

    An op without a row hoists nothing: a decomposition may branch on its numbers.
    """
    found = rule_for(op)
    if found is None:
        return frozenset()
    # A number in the place of a tensor (`x * 0.5` is `mul.Tensor`) is a number all the same.
    scalars = {a.name for a in op._schema.arguments if str(a.type).count("number") or str(a.type).count("Tensor")}
    if found.cls is OpClass.FACTORY:
        scalars &= {"fill_value", "value", "s"}  # the other numbers of a factory decide its shape
    return frozenset(scalars - found.keep | found.hoist)
