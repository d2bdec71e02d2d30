"""Orthogonal polynomials `p_n(x)` by their recurrences, with the degree a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from .elementwise import as_array, convert, isnan, together, where
from .lowering import Context
from .rule import OpClass, Promote, rule


@dataclass(frozen=True, slots=True)
class Family:
    """`p_0 = 1`, `p_1 = first(x)`, `p_(k+1) = step(k, x, p_k, p_(k-1))`.

    `known(x, n)` gives (where, values) that need no recurrence; `limits` the degree beyond which eager answers NaN,
    by the size of the dtype in bytes.
    """

    first: Callable[[Any], Any]
    step: Callable[[Any, Any, Any, Any], Any]
    known: Callable[[Any, Any], tuple[Any, Any]] | None = None
    limits: dict[int, int] | None = None


def evaluate(family: Family, x: Any, n: Any) -> Any:
    """The polynomials of degree `n` (floats, truncated) at `x`; 0 for negative degrees."""
    degree = convert(n, torch.int64)
    ones = jnp.ones_like(x)
    done = degree < 2
    values = where(degree < 0, 0, where(degree == 0, 1, family.first(x)))
    if family.known is not None:
        known, closed = family.known(x, degree)
        known = known & (degree >= 0)
        values, done = where(known, closed, values), done | known
    if family.limits is not None:
        far = degree > family.limits[x.dtype.itemsize]
        values, done = where(far, np.nan, values), done | far

    def going(state: tuple[Any, Any, Any]) -> Any:
        k, now, _ = state
        return ((k < degree) & ~done & ~isnan(now)).any()

    def turn(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        k, now, before = state
        active = k < degree
        new = family.step(k.astype(x.dtype), x, now, before)
        return k + 1, where(active, new, now), where(active, now, before)

    _, last, _ = lax.while_loop(going, turn, (jnp.ones((), jnp.int64), family.first(x), ones))
    return where(done, values, last)


def _parity(n: Any, dtype: Any) -> Any:
    return where((n & 1) == 0, as_array(1, dtype), -as_array(1, dtype))


def _chebyshev(
    first: Callable[[Any], Any],
    ends: Callable[[Any], tuple[Any, Any]],
    wave: Callable[[Any, Any], Any],
    beyond: int,
) -> Family:
    """One of the four kinds: its values at 1 and (but for the sign) -1, and its trigonometric form inside."""

    def known(x: Any, n: Any) -> tuple[Any, Any]:
        degree = n.astype(x.dtype)
        right, left = ends(degree)
        inside = (lax.abs(x) < 1) & (n > beyond)
        closed = wave(degree, lax.acos(where(inside, x, 0)))
        edge = where(x > 0, right, left * _parity(n, x.dtype))
        end = lax.abs(x) == 1
        return end | inside, where(end, edge, closed)

    return Family(first, lambda k, x, now, before: (x + x) * now - before, known)


def _kinds(t: int, u: int, v: int, w: int) -> dict[str, Family]:
    """The four kinds; the numbers are the degrees beyond which eager leaves the recurrence."""
    half = 0.5
    return {
        "t": _chebyshev(lambda x: x, lambda n: (1 + 0 * n, 1 + 0 * n), lambda n, a: lax.cos(n * a), t),
        "u": _chebyshev(
            lambda x: x + x, lambda n: (n + 1, n + 1), lambda n, a: lax.sin((n + 1) * a) / lax.sin(a), u
        ),
        "v": _chebyshev(
            lambda x: x + x - 1,
            lambda n: (1 + 0 * n, n + n + 1),
            lambda n, a: lax.cos((n + half) * a) / lax.cos(a / 2),
            v,
        ),
        "w": _chebyshev(
            lambda x: x + x + 1,
            lambda n: (n + n + 1, 1 + 0 * n),
            lambda n, a: lax.sin((n + half) * a) / lax.sin(a / 2),
            w,
        ),
    }


def _legendre_ends(x: Any, n: Any) -> tuple[Any, Any]:
    return lax.abs(x) == 1, where(x > 0, 1, _parity(n, x.dtype))


def _laguerre_zero(x: Any, n: Any) -> tuple[Any, Any]:
    return x == 0, jnp.ones_like(x)


_LIMITS = {4: 128, 8: 512}
_FAMILIES = {
    **{f"chebyshev_polynomial_{k}": f for k, f in _kinds(6, 8, 8, 8).items()},
    "hermite_polynomial_h": Family(
        lambda x: x + x, lambda k, x, now, before: (x + x) * now - 2 * k * before, limits=_LIMITS
    ),
    "hermite_polynomial_he": Family(lambda x: x, lambda k, x, now, before: x * now - k * before, limits=_LIMITS),
    "laguerre_polynomial_l": Family(
        lambda x: 1 - x,
        lambda k, x, now, before: ((k + k + (1 - x)) * now - k * before) / (k + 1),
        _laguerre_zero,
    ),
    "legendre_polynomial_p": Family(
        lambda x: x, lambda k, x, now, before: ((k + k + 1) * x * now - k * before) / (k + 1), _legendre_ends
    ),
}
_SHIFTED = _kinds(6, 6, 6, 4)


def _enter(name: str, function: Callable[[Any, Any], Any]) -> None:
    def lower(cx: Context, x: Any, n: Any) -> Any:
        return function(*together(x, n))

    suffixes = ("default", "x_scalar", "n_scalar")
    rule([f"special_{name}.{s}" for s in suffixes], OpClass.POINTWISE, promote=Promote.INT_TO_FLOAT)(lower)


def _shifted(family: Family, x: Any, n: Any) -> Any:
    return evaluate(family, x + x - 1, n)


for _name, _family in _FAMILIES.items():
    _enter(_name, functools.partial(evaluate, _family))
for _name, _family in _SHIFTED.items():
    _enter(f"shifted_chebyshev_polynomial_{_name}", functools.partial(_shifted, _family))
