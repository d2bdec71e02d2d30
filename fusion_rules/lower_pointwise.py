"""Arithmetic of two and three numbers: sums, quotients, remainders, powers, extremes."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from . import trigonometry
from .elementwise import (
    as_array,
    by_tensors,
    copysign,
    divide,
    enter_binary,
    is_one,
    isnan,
    kind,
    maximum,
    minimum,
    narrow,
    narrow_number,
    need,
    product,
    together,
    torch_makes_nan,
    where,
)
from .lower_elementary import absolute, exp2, reciprocal, rsqrt, trunc
from .lowering import Context
from .rule import OpClass, Promote, rule
from .spec import JAX_DTYPE


@rule(["add.Tensor", "add.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT)
def add(cx: Context, self: Any, other: Any, alpha: Any = 1) -> Any:
    other = narrow_number(cx, other)
    return self + other if is_one(alpha) else self + product(other, narrow(cx, alpha))


@rule(["sub.Tensor", "sub.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT)
def sub(cx: Context, self: Any, other: Any, alpha: Any = 1) -> Any:
    other = narrow_number(cx, other)
    return self - other if is_one(alpha) else self - product(other, narrow(cx, alpha))


@rule(["rsub.Tensor", "rsub.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT)
def rsub(cx: Context, self: Any, other: Any, alpha: Any = 1) -> Any:
    other = narrow_number(cx, other)
    return other - self if is_one(alpha) else other - product(self, narrow(cx, alpha))


@rule(["mul.Tensor", "mul.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT)
def mul(cx: Context, self: Any, other: Any) -> Any:
    return product(self, other)


@rule(["div.Tensor", "div.Scalar"], OpClass.POINTWISE, promote=Promote.INT_TO_FLOAT)
def div(cx: Context, self: Any, other: Any) -> Any:
    return divide(self, other)


def _divisor(cx: Context, other: Any) -> Any:
    """An integer divisor with zeros reported as eager does, and replaced by one."""
    other = jnp.asarray(other)
    if cx.out[0].numel:
        cx.check((other == 0).any(), "RuntimeError", "ZeroDivisionError")
    return where(other == 0, 1, other)


def _floor_quotient(cx: Context, x: Any, y: Any) -> Any:
    """Python's `x // y` for floats, by way of the exact remainder: `floor(x / y)` would round 0.9999999 up to 1."""
    # ATen rounds every step to half precision, unless the divisor is a single number.
    step = (lambda v: v) if np.ndim(y) == 0 else (lambda v: narrow(cx, v))
    x, y = together(x, y)
    rest = lax.rem(x, y)
    quotient = step(divide(step(x - rest), y))
    quotient = where((rest != 0) & ((y < 0) != (rest < 0)), step(quotient - 1), quotient)
    low = lax.floor(quotient)
    low = where(step(quotient - low) > 0.5, step(low + 1), low)
    plain = divide(x, y)
    low = where(quotient == 0, copysign(jnp.zeros_like(quotient), plain), low)
    return where(y == 0, plain, low)


def _divide_floor(cx: Context, x: Any, y: Any) -> Any:
    if kind(x) == "f":
        return _floor_quotient(cx, x, y)
    x, y = together(x, _divisor(cx, y))
    quotient = lax.div(x, y)
    if kind(x) == "u":
        return quotient
    rest = lax.rem(x, y)
    return where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)


def _divide_trunc(cx: Context, x: Any, y: Any) -> Any:
    if kind(x) == "f":
        quotient = divide(x, y)
        return trunc(narrow(cx, quotient) if np.ndim(y) else quotient)
    return lax.div(*together(x, _divisor(cx, y)))


@rule(["div.Tensor_mode", "div.Scalar_mode"], OpClass.POINTWISE, promote=Promote.DEFAULT, may_raise=True)
def div_mode(cx: Context, self: Any, other: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return divide(as_array(self, _float_of(cx)), as_array(other, _float_of(cx)))
    self, other = _arrays(self, other)
    return (_divide_floor if rounding_mode == "floor" else _divide_trunc)(cx, self, other)


def _float_of(cx: Context) -> Any:
    """The dtype in which a true division of integers is computed."""
    dtype = JAX_DTYPE[cx.out[0].dtype]
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _arrays(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands, of which one may be a Python number, as arrays of one dtype."""
    dtype = next(v.dtype for v in (x, y) if hasattr(v, "dtype"))
    return as_array(x, dtype), as_array(y, dtype)


@rule(["floor_divide.default", "floor_divide.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT, may_raise=True)
def floor_divide(cx: Context, self: Any, other: Any) -> Any:
    return _divide_floor(cx, *_arrays(self, other))


def _remainder_operands(cx: Context, x: Any, y: Any) -> tuple[Any, Any]:
    x, y = _arrays(x, y)
    return together(x, narrow_number(cx, y) if kind(x) == "f" else _divisor(cx, y))


def _rest(cx: Context, x: Any, y: Any) -> Any:
    """C's `fmod`, which torch's vector code does not know where the quotient is infinite."""
    rest, dtype = lax.rem(x, y), cx.out[0].dtype
    if kind(x) != "f" or not torch_makes_nan(torch.fmod, (torch.finfo(dtype).max, 0.5), dtype):
        return rest
    return where(lax.abs(x / y) == np.inf, np.nan, rest)


@rule(
    ["remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"],
    OpClass.POINTWISE,
    promote=Promote.DEFAULT,
    may_raise=True,
)
def remainder(cx: Context, self: Any, other: Any) -> Any:
    x, y = _remainder_operands(cx, self, other)
    rest = _rest(cx, x, y)
    return rest if kind(x) == "u" else where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@rule(["fmod.Tensor", "fmod.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT, may_raise=True)
def fmod(cx: Context, self: Any, other: Any) -> Any:
    return _rest(cx, *_remainder_operands(cx, self, other))


def _fmax(x: Any, y: Any) -> Any:
    x, y = together(x, y)
    return lax.select((x >= y) | isnan(y), x, y)


def _fmin(x: Any, y: Any) -> Any:
    x, y = together(x, y)
    return lax.select((x <= y) | isnan(y), x, y)


def _heaviside(x: Any, values: Any) -> Any:
    x, values = together(x, values)
    return lax.select(x == 0, values, (x > 0).astype(x.dtype))


def _hypot(x: Any, y: Any) -> Any:
    x, y = together(absolute(x), absolute(y))
    big, small = lax.max(x, y), lax.min(x, y)
    ratio = small / where(big == 0, 1, big)
    length = big * lax.sqrt(1 + ratio * ratio)
    infinite = (x == np.inf) | (y == np.inf)
    return where(infinite, np.inf, length)


def _logaddexp(exp: Any, log1p: Any) -> Any:
    def function(x: Any, y: Any) -> Any:
        x, y = together(x, y)
        swap = x.real < y.real if kind(x) == "c" else x < y
        top, low = lax.select(swap, y, x), lax.select(swap, x, y)
        # Two equal infinities: their difference is NaN, their sum is either of them.
        same = (top == low) & (lax.abs(top) == np.inf)
        total = where(same, top, top + log1p(exp(low - where(same, 0, top))))
        return where(isnan(x) | isnan(y), x + y, total)

    return function


_LN2 = math.log(2)


def _log1p2(x: Any) -> Any:
    return lax.log1p(x) * as_array(1 / _LN2, x.dtype)


def _euclid(x: Any, y: Any) -> Any:
    x, y = together(absolute(x), absolute(y))

    def step(pair: tuple[Any, Any]) -> tuple[Any, Any]:
        a, b = pair
        return where(b == 0, a, b), where(b == 0, 0, lax.rem(a, where(b == 0, 1, b)))

    return lax.while_loop(lambda pair: (pair[1] != 0).any(), step, (x, y))[0]


def _lcm(x: Any, y: Any) -> Any:
    # C++ computes narrow integers as int: the absolute value is taken before they are cut down again.
    wide = np.promote_types(x.dtype, np.int32)
    x, y = together(x.astype(wide), y.astype(wide))
    common = _euclid(x, y)
    return where(common == 0, 0, absolute(lax.div(x, where(common == 0, 1, common)) * y))


enter_binary(
    {
        "fmax": _fmax,
        "fmin": _fmin,
        "gcd": _euclid,
        "hypot": _hypot,
        "lcm": _lcm,
        "logaddexp": _logaddexp(lax.exp, lax.log1p),
        "logaddexp2": _logaddexp(exp2, _log1p2),
        "maximum": maximum,
        "minimum": minimum,
    },
    Promote.DEFAULT,
)
enter_binary({"heaviside": _heaviside, "nextafter": lambda x, y: lax.nextafter(*together(x, y))}, Promote.NO_OPMATH)
enter_binary({"atan2": trigonometry.atan2}, Promote.INT_TO_FLOAT)
enter_binary({"copysign": lambda x, y: copysign(*_arrays(x, y))}, Promote.INT_TO_FLOAT, ("Tensor", "Scalar"))


def _integer_power(x: Any, n: Any) -> Any:
    """Integers to integer powers, wrapping around; of negative powers only those of 1 and -1 are not 0."""
    x, n = together(x, n)

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        total, base, left = state
        return where((left & 1) != 0, total * base, total), base * base, left >> 1

    positive = n if kind(n) == "u" else where(n < 0, 0, n)
    start = (jnp.ones_like(x), x, positive)
    power = lax.while_loop(lambda state: (state[2] != 0).any(), step, start)[0]
    if kind(n) == "u":
        return power
    sign = where((n & 1) != 0, x, 1)
    return where(n < 0, where((x == 1) | (x == -1), sign, 0), power)


def power(x: Any, n: Any) -> Any:
    """x**n elementwise, operands of one dtype."""
    if kind(x) == "b":
        return x | ~n
    if kind(x) == "f":
        return lax.pow(*together(x, n.astype(x.dtype)))
    if kind(x) == "c":
        # The narrow type takes the wide one's: digits are lost in the exponent's product.
        x, n = together(x.astype(np.complex128), n.astype(np.complex128))
        return where(x == 0, _power_of_zero(n), lax.pow(x, n))
    return _integer_power(x, n)


def _power_of_zero(n: Any) -> Any:
    """Complex 0**n as `exp(n * log(0))` is it: not 1 for 0, but NaN."""
    real = lax.real(n) * -math.inf - 0 * lax.imag(n)
    return lax.complex(lax.exp(real), where(real < 0, jnp.zeros_like(real), math.nan))


@rule(["pow.Tensor_Tensor", "pow.Scalar"], OpClass.POINTWISE, promote=Promote.BOOL_TO_LONG)
def pow_tensor(cx: Context, self: Any, exponent: Any) -> Any:
    return power(*_arrays(self, exponent))


# The exponents for which ATen's kernel takes another road than `pow`.
_POWERS: dict[float, Any] = {
    -2.0: lambda x: reciprocal(product(x, x)),
    -1.0: reciprocal,
    -0.5: rsqrt,
    0.0: jnp.ones_like,
    0.5: lax.sqrt,
    1.0: lambda x: x,
    2.0: lambda x: product(x, x),
    3.0: lambda x: product(product(x, x), x),
}


@rule("pow.Tensor_Scalar", OpClass.POINTWISE, promote=Promote.BOOL_TO_LONG, keep=["exponent"])
def pow_scalar(cx: Context, self: Any, exponent: Any) -> Any:
    if isinstance(exponent, complex) and exponent.imag == 0:
        exponent = exponent.real
    if not isinstance(exponent, complex) and not (cx.out[0].dtype == torch.float16 and abs(exponent) == 0.5):
        special = _POWERS.get(float(exponent))
        if special is not None and (kind(self) in "fc" or exponent >= 0):
            return special(self)
    if kind(self) in "iu":
        need(exponent >= 0, "eager refuses negative powers of integers")
        return lax.integer_pow(self, int(exponent))
    return power(*_arrays(self, narrow_number(cx, exponent)))


@rule(["lerp.Tensor", "lerp.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT)
def lerp(cx: Context, self: Any, end: Any, weight: Any) -> Any:
    # ATen measures from the nearer end, so that weight 1 gives `end` exactly.
    weight = as_array(weight, self.dtype)
    near = lax.abs(weight) < 0.5
    return where(near, self, end) + where(near, weight, weight - 1) * (end - self)


@rule("addcmul.default", OpClass.POINTWISE)
def addcmul(cx: Context, self: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    self, tensor1, tensor2, factor = by_tensors((self, tensor1, tensor2), value)
    return self + product(tensor1 if is_one(value) else product(factor, tensor1), tensor2)


@rule("addcdiv.default", OpClass.POINTWISE, promote=Promote.DEFAULT)
def addcdiv(cx: Context, self: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return self + divide(tensor1 if is_one(value) else value * tensor1, tensor2)
