"""Padded: what JAX's primitives do with values of which only a front part is valid, where a size is any up to a bound.

A region that is compiled for the largest size of a bucket serves all smaller ones, if what lies behind the valid part
of each value reaches none. A row of the table says for one primitive what is valid of its results, and which operands
have to be filled, behind their valid part, with what leaves the result as it is: zeros before a sum. What has no row,
or mixes in a way that no filling cures, is refused. So nothing is padded by hope.

Here are the words, and `padded_rows` has the table. Each axis is known at two sizes, those of both ends of the bucket,
and in between it is linear. Where these are equal the size is fixed. An axis is a product of factors, as two axes made
one are: of [4, n] made [4n], rows of n are valid in part, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Refused(Exception):
    """Why a size cannot be padded."""


class Factor(NamedTuple):
    """A factor of an axis: its sizes at the upper and the lower end of the bucket. Along a `uniform` one all that a
    value holds is the same, so it is valid however it is taken apart."""

    high: int
    low: int
    uniform: bool = False

    @property
    def varies(self) -> bool:
        return self.high != self.low


Axis = tuple[Factor, ...]
Form = tuple[Axis, ...]  # one for each axis of a value


@dataclass(frozen=True, slots=True)
class Fill:
    """Operand `at` is filled behind its valid part along these axes, with `value`; with what its second operand is,
    where that is None."""

    at: int
    axes: tuple[int, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class Start:
    """A slice that begins, along `axis`, at these places at the two ends of the bucket."""

    axis: int
    high: int
    low: int


@dataclass(frozen=True, slots=True)
class Spread:
    """An axis of operand `at` that is valid from its front is laid out by other factors; or, to `front`, the other way
    round."""

    at: int
    axis: int
    factors: Axis
    front: bool = False


@dataclass(frozen=True, slots=True)
class Clamp:
    """Operand `at` is the place of a part of so many along an axis with these sizes: it is as far from its end."""

    at: int
    factor: Factor
    length: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Of what is written into a value, or taken from it, only the valid part counts: by axis, its sizes and those of
    the value, which limit where it begins."""

    parts: tuple[tuple[int, Factor, Factor], ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Operands are put behind each other along `axis` where what is valid of each ends: these are its parts."""

    axis: int
    parts: tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What is valid along each of these axes is turned round."""

    axes: tuple[tuple[int, Factor | None], ...]  # None: all of it is valid


class Answer(NamedTuple):
    """What a primitive does: the forms of its results, and what has to be done before, or instead."""

    forms: Sequence[Form]
    fills: Sequence[Fill] = ()
    instead: Start | Join | Keep | Turn | None = None
    spreads: Sequence[Spread] = ()
    clamps: Sequence[Clamp] = ()


class Call(NamedTuple):
    """One primitive at both ends of a bucket: `shapes` are those of its results there."""

    name: str
    operands: list[Form]
    high: dict[str, Any]
    low: dict[str, Any]
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    dtypes: list[np.dtype]  # of the operands


def fixed(size: int) -> Axis:
    return (Factor(size, size),)


def new(shape: tuple[tuple[int, ...], tuple[int, ...]], uniform: bool = False) -> Form:
    """The form of a value that is valid from its front.

    Raises:
        Refused: it is not largest at the upper end of the bucket, for which the code is made.
    """
    if any(h < low for h, low in zip(*shape, strict=True)):
        raise Refused("a value gets smaller as the size grows")
    return tuple([(Factor(h, low, uniform),) for h, low in zip(*shape, strict=True)])


def varies(axis: Axis) -> bool:
    return any(f.varies for f in axis)


def sizes(axis: Axis) -> tuple[int, int]:
    return math.prod(f.high for f in axis), math.prod(f.low for f in axis)


def plain(axis: Axis) -> Axis:
    """An axis without factors that do nothing, and each with the fixed ones behind it made one."""
    found: list[Factor] = []
    for f in axis:
        if f.high == f.low == 1:
            continue
        if found and not f.varies:
            last = found.pop()
            f = Factor(last.high * f.high, last.low * f.low, last.uniform and f.uniform)
        found.append(f)
    return tuple(found) or fixed(1)


def join(a: Axis, b: Axis) -> Axis:
    """Where both are valid."""
    if sizes(a) != sizes(b):
        if (1, 1) in (sizes(a), sizes(b)):  # one for all
            return b if sizes(a) == (1, 1) else a
        raise Refused("two operands are of another size")
    for one, other in ((a, b), (b, a)):
        if all(f.uniform or not f.varies for f in one) and len(one) == 1:
            return other
    one, other = plain(a), plain(b)
    if [f[:2] for f in one] != [f[:2] for f in other]:
        raise Refused("two operands are laid out otherwise")
    return tuple([Factor(f.high, f.low, f.uniform and g.uniform) for f, g in zip(one, other, strict=True)])


def joined(forms: Sequence[Form]) -> Form:
    """Where all are valid that are no single numbers."""
    found: Form = ()
    for form in forms:
        if form:
            found = form if not found else tuple(map(join, found, form))
    return found


def fronted(c: Call, at: int, axes: Sequence[int]) -> tuple[Form, list[Spread]]:
    """The form of an operand of which these axes are valid from their front."""
    form, spreads = c.operands[at], []
    for a in axes:
        if varies(form[a]) and len(plain(form[a])) > 1:
            spreads.append(Spread(at, a, form[a], front=True))
            form = (*form[:a], (Factor(*sizes(form[a])),), *form[a + 1 :])
    return form, spreads


def aligned(c: Call, pairs: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[Form], list[Spread]]:
    """The forms of a call's operands where axes that meet, each set as (operand, axis), are laid out alike."""
    forms, spreads = list(c.operands), []
    for met in pairs:
        layouts = [plain(forms[at][a]) for at, a in met]
        wanted = next((x for x in layouts if len(x) > 1 and any(f.varies for f in x)), None)
        for (at, a), layout in zip(met, layouts, strict=True):
            alone = len(layout) == 1 and layout[0].varies and not layout[0].uniform
            if wanted is not None and alone and sizes(layout) == sizes(wanted):
                spreads.append(Spread(at, a, wanted))
                forms[at] = (*forms[at][:a], wanted, *forms[at][a + 1 :])
    return forms, spreads


def same(c: Call, *but: str) -> None:
    """See that a call has the same parameters at both ends, but for these.

    Raises:
        Refused: it has not.
    """
    for name, value in c.high.items():
        if name not in but and not _equal(value, c.low[name]):
            raise Refused(f"{c.name} depends on the size ({name})")


def _equal(a: Any, b: Any) -> bool:
    if hasattr(a, "jaxpr") or hasattr(a, "eqns"):
        return str(a) == str(b) and [np.asarray(x).tobytes() for x in getattr(a, "consts", ())] == [
            np.asarray(x).tobytes() for x in getattr(b, "consts", ())
        ]
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and (a is b or bool(np.all(a == b)))
