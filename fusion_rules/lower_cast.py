"""Copies, conversions between dtypes, and the parts of complex numbers."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from .elementwise import convert, isnan, kind, spread, together, where
from .lowering import Context
from .rule import OpClass, Promote, rule


@rule(["_to_copy.default", "clone.default", "_lazy_clone.default", "lift_fresh_copy.default"], OpClass.POINTWISE)
def to_copy(cx: Context, self: Any, **layout: Any) -> Any:
    """A copy in the dtype of the result. Where it lies in memory is the caller's business, not XLA's."""
    return convert(self, cx.out[0].dtype)


@rule("copy.default", OpClass.POINTWISE)
def copy(cx: Context, self: Any, src: Any, non_blocking: bool = False) -> Any:
    return spread(convert(src, cx.out[0].dtype), cx.out[0].shape)


def _conj(x: Any) -> Any:
    return lax.conj(x) if kind(x) == "c" else x


@rule(["_conj_physical.default", "conj_physical.default", "_conj_copy.default"], OpClass.POINTWISE)
def conj_physical(cx: Context, self: Any) -> Any:
    return _conj(self)


@rule("_neg_view_copy.default", OpClass.POINTWISE)
def neg_view_copy(cx: Context, self: Any) -> Any:
    return -self


@rule("complex.default", OpClass.POINTWISE)
def complex_from_parts(cx: Context, real: Any, imag: Any) -> Any:
    return lax.complex(*together(real, imag))


@rule("polar.default", OpClass.POINTWISE)
def polar(cx: Context, abs: Any, angle: Any) -> Any:
    size, angle = together(abs, angle)
    return lax.complex(size * lax.cos(angle), size * lax.sin(angle))


@rule("angle.default", OpClass.POINTWISE, promote=Promote.INT_TO_FLOAT)
def angle(cx: Context, self: Any) -> Any:
    if kind(self) == "c":
        return lax.atan2(self.imag, self.real)
    return where(isnan(self), self, where(self < 0, math.pi, jnp.zeros_like(self)))


@rule("view_as_real_copy.default", OpClass.SHAPE)
def view_as_real_copy(cx: Context, self: Any) -> Any:
    return jnp.stack([self.real, self.imag], -1)


@rule("view_as_complex_copy.default", OpClass.SHAPE)
def view_as_complex_copy(cx: Context, self: Any) -> Any:
    return lax.complex(self[..., 0], self[..., 1])
