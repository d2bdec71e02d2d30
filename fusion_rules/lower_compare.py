"""Comparisons, logic, bits, and what chooses between two values by them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .elementwise import as_array, is_negative, isnan, kind, maximum, minimum, need, together, where
from .lowering import Context
from .rule import OpClass, Promote, rule
from .spec import JAX_DTYPE


def _compare(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda cx, self, other: function(*together(self, other))


# Numbers are compared in the tensor's own dtype: bfloat16(0.7) == 0.7 holds.
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    rule([f"{_name}.Tensor", f"{_name}.Scalar"], OpClass.POINTWISE, promote=Promote.NO_OPMATH)(
        _compare(getattr(operator, _name))
    )


def truth(x: Any) -> Any:
    """An array as bools: what is not zero, NaN included."""
    return x if x.dtype == np.bool_ else x != 0


def _logical(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda cx, self, other: function(*together(truth(self), truth(other)))


for _name, _bits in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
    rule(f"logical_{_name}.default", OpClass.POINTWISE)(_logical(_bits))
    rule(
        [f"bitwise_{_name}.{suffix}" for suffix in ("Tensor", "Scalar", "Scalar_Tensor")],
        OpClass.POINTWISE,
        promote=Promote.DEFAULT,
    )(_compare(_bits))


@rule("logical_not.default", OpClass.POINTWISE)
def logical_not(cx: Context, self: Any) -> Any:
    return ~truth(self)


@rule("bitwise_not.default", OpClass.POINTWISE)
def bitwise_not(cx: Context, self: Any) -> Any:
    return ~self


_LEFT = [f"bitwise_left_shift.{s}" for s in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")]
_RIGHT = [f"bitwise_right_shift.{s}" for s in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")]


def _width(x: Any) -> int:
    return 8 * int(np.dtype(x.dtype).itemsize)


def _shift_operands(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Value, distance, and where the distance is one that C++ leaves undefined."""
    x, y = together(x, y)
    need(kind(x) in "iu", "shifts of bools and floats follow rules of their own in eager")
    return x, y, (y < 0) | (y >= _width(x)) if kind(y) == "i" else y >= _width(x)


@rule([*_LEFT, "__lshift__.Tensor", "__lshift__.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT)
def shift_left(cx: Context, self: Any, other: Any) -> Any:
    x, y, outside = _shift_operands(self, other)
    return where(outside, 0, lax.shift_left(x, where(outside, 0, y)))


@rule([*_RIGHT, "__rshift__.Tensor", "__rshift__.Scalar"], OpClass.POINTWISE, promote=Promote.DEFAULT)
def shift_right(cx: Context, self: Any, other: Any) -> Any:
    x, y, outside = _shift_operands(self, other)
    if kind(x) == "u":
        return where(outside, 0, lax.shift_right_logical(x, where(outside, 0, y)))
    # All that is left of a number shifted too far is its sign.
    return lax.shift_right_arithmetic(x, where(outside, _width(x) - 1, y))


def _infinite(x: Any) -> Any:
    if kind(x) == "c":
        return _infinite(x.real) | _infinite(x.imag)
    return lax.abs(x) == np.inf if kind(x) == "f" else jnp.zeros(x.shape, np.bool_)


def _equals(value: float) -> Callable[[Any], Any]:
    return lambda x: x == value if kind(x) == "f" else jnp.zeros(x.shape, np.bool_)


def _signbit(x: Any) -> Any:
    if kind(x) in "bu":
        return jnp.zeros(x.shape, np.bool_)
    return is_negative(x) if kind(x) == "f" else x < 0


for _name, _test in {
    "isinf": _infinite,
    "isnan": isnan,
    "isneginf": _equals(-np.inf),
    "isposinf": _equals(np.inf),
    "signbit": _signbit,
}.items():
    rule(f"{_name}.default", OpClass.POINTWISE)(lambda cx, self, test=_test: test(self))


@rule("where.self", OpClass.POINTWISE)
def where_self(cx: Context, condition: Any, self: Any, other: Any) -> Any:
    dtype = JAX_DTYPE[cx.out[0].dtype]
    return where(truth(condition), as_array(self, dtype), as_array(other, dtype))


def at_least(x: Any, low: Any) -> Any:
    """`x`, but no less than `low`; NaN if either is. `x` stays where they are equal: -0.0 is not below 0.0."""
    x, low = together(x, low)
    return lax.select((x >= low) | isnan(x), x, low) if kind(x) == "f" else lax.max(x, low)


def at_most(x: Any, high: Any) -> Any:
    """`x`, but no more than `high`, with the rules of `at_least`."""
    x, high = together(x, high)
    return lax.select((x <= high) | isnan(x), x, high) if kind(x) == "f" else lax.min(x, high)


@rule("clamp.default", OpClass.POINTWISE, promote=Promote.NO_OPMATH)
def clamp(cx: Context, self: Any, min: Any = None, max: Any = None) -> Any:
    low = self if min is None else at_least(self, min)
    bounded = low if max is None else at_most(low, max)
    if min is None or max is None or kind(self) != "f":
        return bounded
    # A NaN bound makes everything NaN; the upper one has just overwritten the lower.
    return where(isnan(as_array(min, self.dtype)), np.nan, bounded)


@rule("clamp_min.default", OpClass.POINTWISE, promote=Promote.NO_OPMATH)
def clamp_min(cx: Context, self: Any, min: Any) -> Any:
    return at_least(self, min)


@rule("clamp_max.default", OpClass.POINTWISE, promote=Promote.NO_OPMATH)
def clamp_max(cx: Context, self: Any, max: Any) -> Any:
    return at_most(self, max)


@rule("clamp.Tensor", OpClass.POINTWISE, promote=Promote.NO_OPMATH)
def clamp_tensor(cx: Context, self: Any, min: Any = None, max: Any = None) -> Any:
    low = self if min is None else maximum(self, min)
    return low if max is None else minimum(low, max)


@rule("clamp_min.Tensor", OpClass.POINTWISE, promote=Promote.NO_OPMATH)
def clamp_min_tensor(cx: Context, self: Any, min: Any) -> Any:
    return maximum(self, min)


@rule("clamp_max.Tensor", OpClass.POINTWISE, promote=Promote.NO_OPMATH)
def clamp_max_tensor(cx: Context, self: Any, max: Any) -> Any:
    return minimum(self, max)


@rule("nan_to_num.default", OpClass.POINTWISE)
def nan_to_num(
    cx: Context, self: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    if kind(self) == "c":
        parts = (nan_to_num(cx, part, nan, posinf, neginf) for part in (self.real, self.imag))
        return lax.complex(*parts)
    if kind(self) != "f":
        return self
    limits = jnp.finfo(self.dtype)
    most = as_array(posinf, self.dtype) if posinf is not None else limits.max
    least = as_array(neginf, self.dtype) if neginf is not None else limits.min
    finite = where(self == np.inf, most, where(self == -np.inf, least, self))
    return where(isnan(self), as_array(0.0 if nan is None else nan, self.dtype), finite)
