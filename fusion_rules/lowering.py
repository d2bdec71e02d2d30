"""Calling a row: the arguments promoted as torch does, run-time checks, the result held to the promised specs."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promote

from . import promotion
from .deferred import jax, jnp
from .rule import Rule
from .spec import JAX_DTYPE, Spec, torch_dtype


class NoLowering(Exception):
    """An op that has neither a row nor a decomposition, or whose row declines these arguments: run it as an island."""


class LoweringError(Exception):
    """A row broke its contract (wrong shape or number of results): a defect of this library."""


# What a check may raise, by the name that an executable keeps of it.
EXCEPTIONS: dict[str, type[Exception]] = {e.__name__: e for e in (IndexError, RuntimeError, torch.linalg.LinAlgError)}


@dataclass(frozen=True, slots=True)
class Check:
    """A condition that only values reveal. `bad` is a 0-d bool array; `value` the offending number, if there is one.

    `error` is the name of eager's exception type (in `EXCEPTIONS`), `message` its text with `{value}` where eager
    prints the number, or `{range}` for the two that `as_range` has made one of.
    """

    bad: jax.Array
    value: jax.Array
    error: str
    message: str


def as_range(low: jax.Array, high: jax.Array) -> jax.Array:
    """The two ends of a range as the one number of a check, in float32: eager prints six digits of them."""
    first, second = (
        jax.lax.bitcast_convert_type(x.astype(np.float32), jnp.int32).astype(jnp.int64) for x in (low, high)
    )
    return (first << 32) | (second & 0xFFFFFFFF)


def text_of(message: str, value: int) -> str:
    """The text of a check that has failed for a number."""
    if "{range}" in message:
        low, high = struct.unpack("<ff", struct.pack("<q", value))[::-1]
        # As C++ prints them; ATen's kernel makes the NaN that processors make, whose sign is set.
        shown = ["-nan" if math.isnan(x) else f"{x:g}" for x in (low, high)]
        message = message.replace("{range}", f"[{', '.join(shown)}]")
    return message.replace("{value}", str(value))


@dataclass(frozen=True, slots=True)
class Places:
    """How the arguments of a lowering lie in memory, and what becomes of its results.

    `by_columns` are the matrices whose columns lie together, not their rows; `by_planes` the images whose channels
    lie apart, as torch has them; `is_kept`, whether the results are more than a step on the way; `read_as`, the shape
    in which all that reads the one result sees it, if that is known.
    """

    by_columns: Sequence[jax.Array] = ()
    by_planes: Sequence[jax.Array] = ()
    is_kept: bool = False
    read_as: tuple[int, ...] | None = None


@dataclass
class Context:
    """What a lowering may ask for besides its arguments: the specs of its outputs, where to put checks, and where the
    arguments are.
    """

    out: tuple[Spec, ...]
    checks: list[Check] = field(default_factory=list)
    bounds: bool = True
    places: Places = field(default_factory=Places)

    def check(self, bad: jax.Array, error: str, message: str, value: jax.Array | int = 0) -> None:
        """Ask for `error(message)` at the next sync point if `bad` turns out true.

        Raises:
            LoweringError: there is no such exception.
        """
        if error not in EXCEPTIONS:
            raise LoweringError(f"a check cannot raise {error}, only one of {', '.join(EXCEPTIONS)}")
        if self.bounds:
            self.checks.append(Check(bad, jnp.asarray(value, jnp.int64), error, message))

    def check_index(self, index: jax.Array, low: int, high: int, error: str, message: str) -> None:
        """Ask for `error` if any element of an integer `index` lies outside `[low, high)`."""
        if not self.bounds or index.size == 0:
            return

        def outside(index: jax.Array) -> jax.Array:
            return (index < low) | (index >= high)

        def first(index: jax.Array) -> jax.Array:
            return index.reshape(-1)[jnp.argmax(outside(index))].astype(jnp.int64)

        bad = outside(index).any()
        # Another pass, which only who is to be told of it has to wait for.
        self.check(bad, error, message, jax.lax.cond(bad, first, lambda _: jnp.zeros((), jnp.int64), index))


@dataclass(frozen=True, slots=True)
class Hoisted:
    """A Python number that is an input of the region: a 0-d array, and the Python type that promotion looks at."""

    value: jax.Array
    kind: type


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `fn` to every leaf of nested lists and tuples (the only containers in ATen arguments)."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, x) for x in tree)
    return fn(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for x in tree for leaf in leaves(x)]
    return [tree]


def computation_dtype(args: Any, kwargs: dict[str, Any], kind: Promote) -> torch.dtype:
    """torch's computation dtype for elementwise arguments (arrays, `Hoisted`, Python numbers; the rest is ignored)."""
    operands: list[tuple[torch.dtype, int]] = []
    for leaf in leaves([args, kwargs]):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            operands.append((torch_dtype(leaf), promotion.DIMENSIONED if leaf.ndim else promotion.SCALAR))
        elif isinstance(leaf, (Hoisted, bool, int, float, complex)):
            number = leaf.kind if isinstance(leaf, Hoisted) else type(leaf)
            operands.append((promotion.number_dtype(number), promotion.NUMBER))
    return promotion.computation_dtype(promotion.promoted(operands), kind, torch.get_default_dtype())


def cast(x: Any, dtype: Any) -> Any:
    """An array in another NumPy dtype.

    Bools become numbers by a select, because XLA turns a product with a converted bool into one that forgets NaN * 0
    and -1 * 0.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    if x.dtype == np.bool_ and isinstance(x, jax.Array):
        return jax.lax.select(x, jnp.ones(x.shape, dtype), jnp.zeros(x.shape, dtype))
    return x.astype(dtype)


def _converter(dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """Numbers and arrays to `dtype`; with None only unwrap `Hoisted`."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Hoisted):
            leaf = leaf.value
        elif not isinstance(leaf, (jax.Array, np.ndarray)):
            return leaf
        return leaf if dtype is None else cast(leaf, JAX_DTYPE[dtype])

    return convert


def apply_rule(rule: Rule, cx: Context, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a row with its arguments promoted as it asks.

    Raises:
        LoweringError: it asks for a check that its row does not speak of: where nobody reads the result it would
            never be evaluated.
    """
    dtype = None if rule.promote is None else computation_dtype(args, kwargs, rule.promote)
    convert = _converter(dtype)
    args = [map_leaves(convert, a) for a in args]
    kwargs = {k: map_leaves(convert, v) for k, v in kwargs.items()}
    # Python numbers that were kept: promoted rows want them as numbers still (an exponent, a dimension).
    results = rule.here(cx, *args, **kwargs)
    if cx.checks and not rule.may_raise:
        raise LoweringError(f"the lowering of {rule.op} asks for checks, but its row does not say that it may raise")
    return results


def conform(op: str, results: Any, out: tuple[Spec, ...]) -> tuple[jax.Array, ...]:
    """Results as a flat tuple in the promised dtypes.

    Raises:
        LoweringError: the number or a shape differs from what torch promises; nothing is broadcast silently.
    """
    flat = list(leaves(results)) if isinstance(results, (list, tuple)) else [results]
    if len(flat) != len(out):
        raise LoweringError(f"the lowering of {op} returned {len(flat)} results, torch has {len(out)}")
    done = []
    for result, spec in zip(flat, out, strict=True):
        array = jnp.asarray(result)
        if tuple(array.shape) != spec.shape:
            raise LoweringError(f"the lowering of {op} returned shape {tuple(array.shape)}, torch has {spec.shape}")
        done.append(to_dtype(array, spec.dtype))
    return tuple(done)


def to_dtype(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Convert as torch does: complex to real drops the imaginary part, float to bool is `!= 0`."""
    want = JAX_DTYPE[dtype]
    have = np.dtype(x.dtype)
    if have == want:
        return x
    if have.kind == "c" and want.kind not in "cb":
        x = x.real
    return cast(x, want)
