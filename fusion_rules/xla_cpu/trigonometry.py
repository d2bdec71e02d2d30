"""Sines and arcs that a loop can be vectorised around.

XLA:CPU calls libm for them, number by number, and one such call keeps the whole fused loop from being vectorised:
twenty ops on a million numbers take 25 ms with it and 6 without. These are polynomials for float32 (16-bit floats go
through it), within two units in the last place; float64 and complex keep XLA's own.

The reduction to a quarter turn is Cody and Waite's (Software Manual for the Elementary Functions, 1980), carried out in
float64; the polynomials are those of Moshier's Cephes (sinf.c, atanf.c, asinf.c).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from .. import trigonometry
from ..elementwise import as_array, copysign, elementwise, together, where
from ..platforms import Variants

# Below this, what a call costs is nothing, and compiling is quicker without.
WORTHWHILE = 4096
# Up to here the number of quarter turns times `_HEAD` is exact in float64.
_REACH = 2.0**20
_HEAD = math.floor(math.pi / 2 * 2.0**32) / 2.0**32
_TAIL = 6.077100506506192e-11  # pi / 2 - _HEAD
_HALF = as_array(0.5, "float32")


def _polynomial(x: Any, *coefficients: float) -> Any:
    """Horner's scheme in float32, the highest power first."""
    out = as_array(coefficients[0], "float32")
    for c in coefficients[1:]:
        out = out * x + as_array(c, "float32")
    return out


def _enter(function: Variants[Any], ours: Callable[..., Any]) -> None:
    """Have a function computed by `ours` where it is the better way."""

    @function.on("cpu")
    def by_polynomial(*args: Any) -> Any:
        dtype = np.dtype(args[0].dtype)
        if args[0].size < WORTHWHILE or dtype.name not in ("float32", "bfloat16", "float16"):
            return function.any(*args)
        return as_array(ours(*[as_array(a, "float32") for a in args]), dtype)


def _wave(quarters: int, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The sine of a number plus so many quarter turns."""

    def near(x: Any) -> Any:
        wide = as_array(lax.abs(x), "float64")
        turns = lax.round(wide * (2 / math.pi), lax.RoundingMethod.TO_NEAREST_EVEN)
        r = as_array((wide - turns * _HEAD) - turns * _TAIL, "float32")
        turn = as_array(turns, "int32") + quarters
        z = r * r
        sine = r + r * z * _polynomial(z, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
        terms = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
        cosine = 1 - _HALF * z + z * z * _polynomial(z, *terms)
        found = where((turn & 1) == 0, sine, cosine)
        found = where((turn & 2) == 0, found, -found)
        return found if quarters else _negated_as(found, x)

    def wave(x: Any) -> Any:
        far = lax.abs(x) > _REACH
        return lax.cond(far.any(), lambda x: where(far, own(x), near(x)), near, x)

    return elementwise(wave)


def _negated_as(x: Any, sign: Any) -> Any:
    """`x`, negated where `sign` has its sign bit set."""
    top = as_array(1 << 31, "uint32")
    bits = lax.bitcast_convert_type(x, np.uint32) ^ (lax.bitcast_convert_type(sign, np.uint32) & top)
    return lax.bitcast_convert_type(bits, np.float32)


def _arc(x: Any) -> Any:
    """The arc tangent of 0 <= x <= 1."""
    over = x > math.tan(math.pi / 8)
    t = where(over, (x - 1) / (x + 1), x)
    z = t * t
    found = t + t * z * _polynomial(z, 8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
    return where(over, found + as_array(math.pi / 4, "float32"), found)


def _atan(x: Any) -> Any:
    size = lax.abs(x)
    over = size > 1
    found = _arc(where(over, 1 / size, size))
    return copysign(where(over, as_array(math.pi / 2, "float32") - found, found), x)


def _atan2(y: Any, x: Any) -> Any:
    y, x = together(y, x)
    high, wide = lax.abs(y), lax.abs(x)
    small, large = lax.min(high, wide), lax.max(high, wide)
    ratio = where(large == 0, 0, where(small == np.inf, 1, small / large))
    found = _arc(ratio)
    found = where(high > wide, as_array(math.pi / 2, "float32") - found, found)
    behind = lax.bitcast_convert_type(x, np.int32) < 0
    found = copysign(where(behind, as_array(math.pi, "float32") - found, found), y)
    return where((x != x) | (y != y), np.nan, found)


def _asin_core(x: Any) -> tuple[Any, Any]:
    """For 0 <= x <= 1: whether x is over a half, and the arc sine of x or of the root of (1 - x) / 2."""
    over = x > 0.5
    z = where(over, _HALF * (1 - x), x * x)
    t = where(over, lax.sqrt(z), x)
    terms = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
    return over, t + t * z * _polynomial(z, *terms)


def _asin(x: Any) -> Any:
    over, arc = _asin_core(lax.abs(x))
    return copysign(where(over, as_array(math.pi / 2, "float32") - 2 * arc, arc), x)


def _acos(x: Any) -> Any:
    over, arc = _asin_core(lax.abs(x))
    far = where(x < 0, as_array(math.pi, "float32") - 2 * arc, 2 * arc)
    return where(over, far, as_array(math.pi / 2, "float32") - _negated_as(arc, x))


_sin, _cos = _wave(0, lax.sin), _wave(1, lax.cos)
_enter(trigonometry.sin, _sin)
_enter(trigonometry.cos, _cos)
_enter(trigonometry.tan, lambda x: _sin(x) / _cos(x))
_enter(trigonometry.asin, _asin)
_enter(trigonometry.acos, _acos)
_enter(trigonometry.atan, _atan)
_enter(trigonometry.atan2, _atan2)
