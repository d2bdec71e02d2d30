"""Bessel and Airy functions after Cephes, with ATen's choices at the seams."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from . import special_tables as tables
from .elementwise import as_array, enter_unary, isnan, polynomial, where
from .lower_special import chebyshev
from .rule import Promote

_ROOT = math.sqrt(2 / math.pi)


def _ratio(x: Any, over: tuple[float, ...], under: tuple[float, ...]) -> Any:
    return polynomial(x, over) / polynomial(x, under)


def _wave(x: Any, order: int, outer: Callable[[Any], Any], inner: Callable[[Any], Any], sign: int) -> Any:
    """J or Y of order 0 or 1 beyond 5: an amplitude and a phase. Smaller `x` gives anything but a trap."""
    pp, pq, qp, qq = (getattr(tables, f"J{order}_{t}") for t in ("PP", "PQ", "QP", "QQ"))
    x = where(x > 5, x, 5)
    inverse = 5 / x
    square = inverse * inverse
    phase = x - as_array(math.pi / 4 * (1 + 2 * order), x.dtype)
    swing = _ratio(square, pp, pq) * outer(phase) + sign * inverse * _ratio(square, qp, qq) * inner(phase)
    return swing * as_array(_ROOT, x.dtype) / lax.sqrt(x)


def j0(x: Any) -> Any:
    size = lax.abs(x)
    square = where(size <= 5, size * size, 0)
    roots = (square - as_array(5.78318596294678452118, x.dtype)) * (square - as_array(30.4712623436620863991, x.dtype))
    near = roots * _ratio(square, tables.J0_RP, tables.J0_RQ)
    tiny = 1 - square / 4
    near = where(size < 1e-5, tiny, near)
    return _limit(x, where(size <= 5, near, _wave(size, 0, lax.cos, lax.sin, -1)))


def j1(x: Any) -> Any:
    size = where(x < 0, -x, x)  # -0.0 as it is
    square = where(size <= 5, size * size, 0)
    roots = (square - as_array(14.6819706421238932572, x.dtype)) * (square - as_array(49.2184563216946036703, x.dtype))
    near = _ratio(square, tables.J1_RP, tables.J1_RQ) * size * roots
    value = where(size <= 5, near, _wave(size, 1, lax.cos, lax.sin, -1))
    return _limit(x, where(x < 0, -value, value))


def _limit(x: Any, value: Any) -> Any:
    # The comparisons above sent NaN to the far side as if it were 5; infinity is cos(inf) in eager.
    return where(isnan(x) | (lax.abs(x) == np.inf), np.nan, value)


def y0(x: Any) -> Any:
    square = where(x <= 5, x * x, 0)
    log = lax.log(x)
    near = _ratio(square, tables.Y0_P, tables.Y0_Q) + as_array(2 / math.pi, x.dtype) * log * j0(x)
    return _singular(x, -np.inf, _limit(x, where(x <= 5, near, _wave(x, 0, lax.sin, lax.cos, 1))))


def y1(x: Any) -> Any:
    square = where(x <= 5, x * x, 0)
    shift = as_array(2 / math.pi, x.dtype) * (j1(x) * lax.log(x) - 1 / x)
    near = x * _ratio(square, tables.Y1_P, tables.Y1_Q) + shift
    return _singular(x, -np.inf, _limit(x, where(x <= 5, near, _wave(x, 1, lax.sin, lax.cos, 1))))


def _singular(x: Any, at_zero: float, value: Any) -> Any:
    return where(x == 0, at_zero, where(x < 0, np.nan, value))


def _k(order: int, scaled: bool) -> Callable[[Any], Any]:
    """K0 or K1, times `exp(x)` if scaled."""
    small, large = (tables.K0_A, tables.K0_B) if order == 0 else (tables.K1_A, tables.K1_B)

    def function(x: Any) -> Any:
        low = where(x <= 2, x, 1)
        series = chebyshev(low * low - 2, small)
        log = lax.log(low * as_array(0.5, x.dtype))
        grown = lax.exp(lax.abs(low))
        if order == 0:
            near = series - log * (grown * lax.bessel_i0e(low))
        else:
            near = log * (grown * lax.bessel_i1e(low)) + series / low
        high = where(x > 2, x, 2)
        far = chebyshev(8 / high - 2, large) / lax.sqrt(high)
        near, far = (near * grown, far) if scaled else (near, far * lax.exp(-high))
        return _singular(x, np.inf, where(isnan(x), x, where(x <= 2, near, far)))

    return function


def _spherical_j0(x: Any) -> Any:
    square = x * x
    # The Taylor series of sin(x) / x: 1 - x^2/3! + x^4/5! ...
    near = polynomial(square, tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)))
    return where(lax.abs(x) == np.inf, 0, where(lax.abs(x) < 0.5, near, lax.sin(x) / x))


def _airy_series(terms: int, first: int) -> tuple[float, ...]:
    """Coefficients in x^3 of the two solutions around zero: each is the one before over (3k+first-1)(3k+first)."""
    found = [1.0]
    for k in range(1, terms):
        found.append(found[-1] / ((3 * k + first - 1) * (3 * k + first)))
    return tuple(reversed(found))


_AIRY_F, _AIRY_G = _airy_series(16, 0), _airy_series(16, 1)


def airy_ai(x: Any) -> Any:
    scale = as_array(1 / math.sqrt(math.pi), x.dtype)
    middle = where(lax.abs(x) <= 2.09, x, 0)
    cube = middle * middle * middle
    near = as_array(0.355028053887817239260, x.dtype) * polynomial(cube, _AIRY_F)
    near = near - as_array(0.258819403792806798405, x.dtype) * middle * polynomial(cube, _AIRY_G)

    right = where(x >= 2.09, x, 3)
    zeta = 2 * right * lax.sqrt(right) / 3
    decay = 2 * lax.sqrt(lax.sqrt(right)) * lax.exp(zeta)
    above = scale * _ratio(1 / zeta, tables.AI_AN, tables.AI_AD) / decay

    left = where(x < -2.09, -x, 3)
    zeta = 2 * left * lax.sqrt(left) / 3
    z = 1 / zeta
    phase = zeta + as_array(math.pi / 4, x.dtype)
    sine = 1 + z * z * _ratio(z * z, tables.AI_AFN, tables.AI_AFD)
    cosine = z * _ratio(z * z, tables.AI_AGN, tables.AI_AGD)
    below = scale / lax.sqrt(lax.sqrt(left)) * (lax.sin(phase) * sine - lax.cos(phase) * cosine)

    value = where(x < -2.09, below, where(x >= 2.09, above, near))
    value = where(x > 103.892, 0, value)
    return where(isnan(x) | (lax.abs(x) == np.inf), np.nan, value)


enter_unary(
    {
        "special_airy_ai": airy_ai,
        "special_bessel_j0": j0,
        "special_bessel_j1": j1,
        "special_bessel_y0": y0,
        "special_bessel_y1": y1,
        "special_modified_bessel_k0": _k(0, False),
        "special_modified_bessel_k1": _k(1, False),
        "special_scaled_modified_bessel_k0": _k(0, True),
        "special_scaled_modified_bessel_k1": _k(1, True),
        "special_spherical_bessel_j0": _spherical_j0,
    },
    Promote.INT_TO_FLOAT,
)
