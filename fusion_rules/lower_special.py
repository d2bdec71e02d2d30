"""Special functions: error functions, gamma and its relatives, zeta, entropies, i0 and i1."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special as scipy_special

from .elementwise import as_array, copysign, enter_binary, enter_unary, isnan, together, where
from .lowering import Context
from .platforms import Variants
from .rule import OpClass, Promote, rule
from .special_tables import ERFCX, LGAMMA


def chebyshev(y: Any, coefficients: tuple[float, ...]) -> Any:
    """A Chebyshev series by Clenshaw's scheme, Cephes' way: `y` is twice the argument, the last coefficient halved."""
    older = newer = jnp.zeros_like(y)
    newest = jnp.full_like(y, coefficients[0])
    for c in coefficients[1:]:
        older, newer = newer, newest
        newest = y * newer - older + as_array(c, y.dtype)
    return as_array(0.5, y.dtype) * (newest - older)


def erfcx(x: Any) -> Any:
    """`exp(x*x) * erfc(x)`."""
    size = lax.abs(x)
    t = 2 / (2 + size)
    right = t * lax.exp(chebyshev(4 * t - 2, ERFCX))
    # Left of zero: 2 exp(x*x) less the mirror image. To the right the square would overflow for nothing.
    square = where(x < 0, x * x, 0)
    return where(x < 0, 2 * lax.exp(square) - right, right)


def _erfinv(x: Any) -> Any:
    """XLA's (Giles' polynomials) is off by 5.8e-6 near 1 in float32 (relative); one step of Newton's leaves 3e-7."""
    y = lax.erf_inv(x)
    if x.dtype != jnp.float32:
        return y
    left, size = lax.abs(x), lax.abs(y)
    # 1 - |x| is exact where erf(y) has lost its last digits.
    excess = where(left < 0.5, lax.erf(size) - left, (1 - left) - lax.erfc(size))
    half_root_of_pi = as_array(math.sqrt(math.pi) / 2, x.dtype)
    step = half_root_of_pi * excess * lax.exp(size * size)
    return where(left < 1, copysign(size - step, x), y)


def _log_ndtr(x: Any) -> Any:
    scaled = x * as_array(math.sqrt(0.5), x.dtype)
    half = as_array(0.5, x.dtype)
    left = lax.log(erfcx(where(x < -1, -scaled, 0)) * half) - scaled * scaled
    return where(x < -1, left, lax.log1p(-lax.erfc(scaled) * half))


def _entr(x: Any) -> Any:
    inside = -x * lax.log(where(x > 0, x, 1))
    return where(x > 0, inside, where(x == 0, 0, where(isnan(x), x, -np.inf)))


def _digamma(x: Any) -> Any:
    return where(x == 0, copysign(jnp.full_like(x, np.inf), -x), lax.digamma(x))


def _lgamma(x: Any) -> Any:
    """XLA's own but around 1 and 2, where it leaves 5e-7 of a zero (float32)."""
    by_one = x < 1.5
    z = x - where(by_one, as_array(1, x.dtype), 2)
    series = jnp.zeros_like(z)
    for term in LGAMMA if x.dtype == jnp.float64 else LGAMMA[-12:]:
        series = as_array(term, x.dtype) - z * series
    near = z * (as_array(1 - np.euler_gamma, x.dtype) + z * series)
    # log(x), not log1p(z), which is off by 1e-14 in float64.
    return where((x > 0.5) & (x < 2.5), near - lax.log(where(by_one, x, 1)), lax.lgamma(x))


def _i0(x: Any) -> Any:
    return lax.exp(lax.abs(x)) * lax.bessel_i0e(x)


def _i1(x: Any) -> Any:
    return lax.exp(lax.abs(x)) * _i1e(x)


def _i1e(x: Any) -> Any:
    # ATen turns the value of |x| where x < 0, which -0.0 is not.
    return where(x == 0, 0, lax.bessel_i1e(x))


enter_unary(
    {
        "digamma": _digamma,
        "erf": lax.erf,
        "erfc": lax.erfc,
        "erfinv": _erfinv,
        "i0": _i0,
        "lgamma": _lgamma,
        "special_entr": _entr,
        "special_erfcx": erfcx,
        "special_i0e": lax.bessel_i0e,
        "special_i1": _i1,
        "special_i1e": _i1e,
        "special_log_ndtr": _log_ndtr,
        "special_modified_bessel_i0": _i0,
        "special_modified_bessel_i1": _i1,
        "special_ndtri": scipy_special.ndtri,
    },
    Promote.INT_TO_FLOAT,
)


# Denominators (2k)! / B_2k of the Euler-Maclaurin corrections.
_BERNOULLI = tuple(
    math.factorial(2 * k) / b
    for k, b in enumerate(
        (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330), 1
    )
)


# A power of doubles, of which a TPU has none, is a thousand instructions there: eight of them took a minute to compile.
BRIEF = Variants("zeta as one loop", any=False, tpu=True, why="doubles are emulated, and slow to compile")
FAR = -32.0  # terms between there and zero: as many turns of a loop over all elements


def zeta(x: Any, q: Any) -> Any:
    """Hurwitz's zeta, the sum of (q + k)^-x.

    Far left of zero, where x has to be whole, the terms before zero are those of the positive sum that begins at q's
    distance from a whole number, but for the end of that sum.
    """

    def mirrored(x: Any, q: Any) -> Any:
        far = (q < FAR) & (q != lax.floor(q))
        part = where(far, -q - lax.floor(-q), as_array(0.5, q.dtype))
        before, end, after = _zetas(x, where(far, part, q), where(far, 1 - q, 1), where(far, 1 - part, 1))
        odd = x - 2 * lax.floor(x * as_array(0.5, x.dtype)) == 1
        sums = where(odd, end - before, before - end) + after
        sums = where((x == 1) | (before == np.inf) & ~odd, np.inf, sums)
        return where(far, where(x == lax.floor(x), sums, np.nan), before)

    return mirrored(x, q) if BRIEF.here else lax.cond((q < FAR).any(), mirrored, _zeta_near, x, q)


def _zetas(x: Any, *qs: Any) -> Any:
    """`_zeta_near` for several q."""
    if not BRIEF.here:
        return tuple(_zeta_near(x, q) for q in qs)
    return _zeta_near(jnp.stack([x] * len(qs)), jnp.stack(qs))


def _zeta_near(x: Any, q: Any) -> Any:
    """Terms until q + k > 9, then Euler and Maclaurin.

    XLA's own adds nine terms whatever `q` is, which leaves nothing right below q = -9.
    """
    whole = q == lax.floor(q)
    # What has no sum is answered below; from 10 on it would not loop.
    answered = (x <= 1) | ((q <= 0) & (whole | (x != lax.floor(x))))
    first = where(answered, 10, q)

    def going(state: tuple[Any, ...]) -> Any:
        i, a, *_ = state
        return (i < 10) | (a <= 9).any()

    def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, a, term, total = state
        active = (i < 10) | (a <= 9)
        a = where(active & (i > 0), a + 1, a)
        term = where(active, lax.pow(a, -x), term)
        return i + 1, a, term, where(i == 0, term, where(active, total + term, total))

    none = jnp.zeros_like(q)
    _, a, term, total = lax.while_loop(going, turn, (jnp.zeros((), jnp.int64), first, none, none))

    def corrected(k: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        tail, rising, falling = state
        tail = tail + rising * falling / denominators[k]
        rising = rising * (x + (2 * k + 1)) * (x + (2 * k + 2))
        return tail, rising, falling / (a * a)

    denominators: Any = np.asarray(_BERNOULLI, x.dtype)
    corrections = term * a / (x - 1) - term / 2, x, term / a
    if BRIEF.here:
        denominators = jnp.asarray(denominators)
        tail, _, _ = lax.fori_loop(0, len(_BERNOULLI), corrected, corrections)
    else:
        for k in range(len(_BERNOULLI)):
            corrections = corrected(k, corrections)
        tail, _, _ = corrections
    total = where(lax.abs(term) < as_array(1.11e-16, x.dtype) * lax.abs(total), total, total + tail)
    pole = where(whole, np.inf, where(x != lax.floor(x), np.nan, total))
    total = where(q <= 0, pole, total)
    return where(x == 1, np.inf, where(x < 1, np.nan, total))


def _zeta(x: Any, q: Any) -> Any:
    # ATen accumulates in double.
    x, q = together(x, q)
    return zeta(x.astype(np.float64), q.astype(np.float64))


def _trigamma(x: Any) -> Any:
    mirrored = x < 0.5
    sine = lax.sin(x * as_array(math.pi, x.dtype))
    z, total = where(mirrored, 1 - x, x), jnp.zeros_like(x)
    for _ in range(6):
        total = total + 1 / (z * z)
        z = z + 1
    square = 1 / (z * z)
    sixth, thirtieth, last = (as_array(1 / n, x.dtype) for n in (6, 30, 42))
    total = total + (1 + 1 / (2 * z) + square * (sixth - square * (thirtieth - square * last))) / z
    return where(mirrored, as_array(math.pi**2, x.dtype) / (sine * sine) - total, total)


@rule("polygamma.default", OpClass.POINTWISE, promote=Promote.INT_TO_FLOAT)
def polygamma(cx: Context, n: int, self: Any) -> Any:
    if n == 0:
        return _digamma(self)
    if n == 1:
        return _trigamma(self)
    # Half precision sums in float32, and shows it where terms of both signs cancel.
    half = cx.out[0].dtype in (torch.bfloat16, torch.float16)
    x = self.astype(np.float32 if half else np.float64)
    return as_array((-1.0) ** (n + 1) * math.factorial(n), x.dtype) * zeta(jnp.full_like(x, n + 1), x)


@rule("mvlgamma.default", OpClass.POINTWISE, promote=Promote.INT_TO_FLOAT)
def mvlgamma(cx: Context, self: Any, p: int) -> Any:
    total = as_array(p * (p - 1) * math.log(math.pi) / 4, self.dtype)
    for j in range(p):
        total = total + _lgamma(self - as_array(j / 2, self.dtype))
    return total


def _times_log(log: Any) -> Any:
    def function(x: Any, y: Any) -> Any:
        x, y = together(x, y)
        return where((x == 0) & ~isnan(y), 0, x * log(y))

    return function


enter_binary({"xlogy": _times_log(lax.log)}, Promote.INT_TO_FLOAT, ("Tensor", "Scalar_Other", "Scalar_Self"))
enter_binary(
    {"special_xlog1py": _times_log(lax.log1p), "special_zeta": _zeta},
    Promote.INT_TO_FLOAT,
    ("default", "other_scalar", "self_scalar"),
)
