"""Functions of one number: rounding, signs, exponentials, logarithms, trigonometry."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import trigonometry
from .elementwise import as_array, copysign, divide, enter_unary, hidden, kind, where
from .lowering import Context
from .platforms import variants
from .rule import OpClass, Promote, rule


def _unless_integer(function: Any) -> Any:
    """Rounding functions leave integers alone."""
    return lambda x: function(x) if kind(x) == "f" else x


def trunc(x: Any) -> Any:
    """Round towards zero; integers as they are."""
    return where(x < 0, lax.ceil(x), lax.floor(x)) if kind(x) == "f" else x


def _round(x: Any) -> Any:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def absolute(x: Any) -> Any:
    """|x|, real for complex x."""
    if kind(x) == "c":
        # An infinite part outweighs a NaN.
        return where((lax.abs(x.real) == np.inf) | (lax.abs(x.imag) == np.inf), np.inf, lax.abs(x))
    return x if kind(x) in "bu" else lax.abs(x)


def sgn(x: Any) -> Any:
    """-1, 0 or 1, with 0 for NaN and -0.0; for complex x the number of modulus 1 in its direction, or 0."""
    if kind(x) == "c":
        size = absolute(x)
        zero = size == 0
        size = where(zero, 1, size)
        return lax.complex(*(where(zero, 0, divide(part, size)) for part in (x.real, x.imag)))
    if kind(x) == "b":
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _sinc(x: Any) -> Any:
    scaled = x * as_array(math.pi, x.dtype)
    zero = scaled == 0
    return where(zero, 1, trigonometry.sin(scaled) / where(zero, 1, scaled))


def reciprocal(x: Any) -> Any:
    one = as_array(1, x.dtype)
    return divide(one, x) if kind(x) == "c" else one / x


@variants
def rsqrt(x: Any) -> Any:
    """`1 / sqrt(x)`."""
    return lax.rsqrt(x)


def _sqrt(x: Any) -> Any:
    """The root. Of a square XLA would make the absolute value, though the square is infinite."""
    return lax.sqrt(hidden(x))


def _exp(x: Any) -> Any:
    """The exponential. Of a product of two XLA would make that of a sum, though one of them is infinite."""
    return hidden(lax.exp(x))


def _log_in(base: float) -> Any:
    """A logarithm that is whole at powers of its base, as in eager: `floor(log10(1000))` has to be 3."""

    def function(x: Any) -> Any:
        raw = lax.log(x) * as_array(1 / math.log(base), x.dtype)
        if kind(x) == "c":
            return raw
        whole = _round(raw)
        return where(lax.abs(raw - whole) <= lax.abs(whole) * as_array(3 * np.finfo(x.dtype).eps, x.dtype), whole, raw)

    return function


def _power_of_two(n: Any, dtype: Any) -> Any:
    """2**n for an integer-valued float array within the exponents of normal numbers, built from its bits."""
    bits = np.finfo(dtype)
    word = np.dtype(f"int{bits.bits}")
    biased = n.astype(word) + as_array(bits.maxexp - 1, word)
    return lax.bitcast_convert_type(biased << as_array(bits.nmant, word), dtype)


def exp2(x: Any) -> Any:
    """2**x, exact for whole x (XLA's own goes through `exp` and is off by 17 units in the last place at 2**47)."""
    if kind(x) == "c":
        return lax.exp(x * as_array(math.log(2), x.dtype))
    reach = as_array(2.0 * np.finfo(x.dtype).maxexp - 4, x.dtype)
    whole = lax.clamp(-reach, _round(x), reach)
    # In two factors: 2**-149 and the last power before infinity have no single normal one.
    half = lax.floor(whole * as_array(0.5, x.dtype))
    fraction = lax.exp((x - whole) * as_array(math.log(2), x.dtype))
    return fraction * _power_of_two(half, x.dtype) * _power_of_two(whole - half, x.dtype)


def _cosh(x: Any) -> Any:
    if kind(x) == "c":
        return lax.cosh(x)
    root = lax.exp(lax.abs(x) * as_array(0.5, x.dtype))
    return as_array(0.5, x.dtype) * root * root + as_array(0.5, x.dtype) / (root * root)


def _sinh(x: Any) -> Any:
    if kind(x) == "c":
        return lax.sinh(x)
    size = lax.abs(x)
    root = lax.exp(size * as_array(0.5, x.dtype))
    far = as_array(0.5, x.dtype) * root * root - as_array(0.5, x.dtype) / (root * root)
    grown = lax.expm1(lax.min(size, jnp.ones_like(size)))
    near = as_array(0.5, x.dtype) * (grown + grown / (grown + 1))
    return copysign(where(size < 1, near, far), x)


enter_unary(
    {
        "abs": absolute,
        "ceil": _unless_integer(lax.ceil),
        "floor": _unless_integer(lax.floor),
        "frac": lambda x: x - trunc(x),
        "neg": lambda x: -x,
        "positive": lambda x: x,
        "round": _unless_integer(_round),
        "sgn": sgn,
        "sign": sgn,
        "trunc": trunc,
    },
    Promote.DEFAULT,
)
enter_unary(
    {
        "acos": trigonometry.acos,
        "acosh": lax.acosh,
        "asin": trigonometry.asin,
        "asinh": lax.asinh,
        "atan": trigonometry.atan,
        "atanh": lax.atanh,
        "cos": trigonometry.cos,
        "cosh": _cosh,
        "deg2rad": lambda x: x * as_array(math.pi / 180, x.dtype),
        "exp": _exp,
        "exp2": exp2,
        "expm1": lax.expm1,
        "log": lax.log,
        "log10": _log_in(10),
        "log1p": lax.log1p,
        "log2": _log_in(2),
        "rad2deg": lambda x: x * as_array(180 / math.pi, x.dtype),
        "reciprocal": reciprocal,
        "rsqrt": rsqrt,
        "sigmoid": lax.logistic,
        "sin": trigonometry.sin,
        "sinc": _sinc,
        "sinh": _sinh,
        "sqrt": _sqrt,
        "tan": trigonometry.tan,
        "tanh": lax.tanh,
    },
    Promote.INT_TO_FLOAT,
)


@rule("round.decimals", OpClass.POINTWISE, promote=Promote.DEFAULT)
def round_decimals(cx: Context, self: Any, *, decimals: int = 0) -> Any:
    if kind(self) != "f":
        return self
    scale = as_array(10.0 ** abs(decimals), self.dtype)
    return divide(_round(self * scale), scale) if decimals >= 0 else _round(divide(self, scale)) * scale


@rule("frexp.Tensor", OpClass.POINTWISE, promote=Promote.DEFAULT)
def frexp(cx: Context, self: Any) -> Any:
    info = np.finfo(self.dtype)
    word = np.dtype(f"int{info.bits}")
    mantissa, mask = as_array(info.nmant, word), as_array((1 << (info.bits - 1 - info.nmant)) - 1, word)

    def exponent_of(bits: Any) -> Any:
        return (bits >> mantissa) & mask

    bits = lax.bitcast_convert_type(lax.abs(self), word)
    # A denormal is its mantissa, read as an integer, times the smallest denormal.
    tiny = (exponent_of(bits) == 0) & (bits != 0)
    bits = where(tiny, lax.bitcast_convert_type(bits.astype(self.dtype), word), bits)
    shift = where(tiny, as_array(info.minexp - info.nmant, word), 0)
    exponent = exponent_of(bits)
    odd = (bits == 0) | (exponent == mask)
    half = (bits & ~(mask << mantissa)) | as_array((info.maxexp - 2) << info.nmant, word)
    found = copysign(lax.bitcast_convert_type(half, self.dtype), self)
    return where(odd, self, found), where(odd, 0, exponent - as_array(info.maxexp - 2, word) + shift)
