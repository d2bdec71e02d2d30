"""Factories: tensors made from numbers alone.

What a tensor is filled with is an input of the region. So are the start and the step of a range: the length is known
from the output, and a position that grows with every generated token must not recompile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax import lax

from .axes import quotient, upcast
from .elementwise import NUMBERS, as_array, convert, isnan, kind, need, where
from .lowering import Context
from .platforms import variants
from .precision import rounded
from .rule import OpClass, rule
from .spec import JAX_DTYPE, Spec


def number(value: Any, dtype: torch.dtype) -> Any:
    """A Python number or a 0-d array in a torch dtype, converted as C++ would."""
    return as_array(value, JAX_DTYPE[dtype]) if isinstance(value, NUMBERS) else convert(value, dtype)


def filled(spec: Spec, value: Any) -> Any:
    """An array of one value."""
    return lax.broadcast(number(value, spec.dtype), spec.shape)


# --- one value everywhere


def _enter_constants(names: list[str], value: float) -> None:
    @rule(names, OpClass.FACTORY)
    def constant(cx: Context, *args: Any, **options: Any) -> Any:
        return filled(cx.out[0], value)


_enter_constants(
    ["zeros.default", "zeros_like.default", "new_zeros.default", "zero.default", "_efficientzerotensor.default"], 0
)
_enter_constants(["ones.default", "ones_like.default", "new_ones.default"], 1)


@rule("full.default", OpClass.FACTORY)
def full(cx: Context, size: Any, fill_value: Any, **options: Any) -> Any:
    return filled(cx.out[0], fill_value)


@rule(["full_like.default"], OpClass.FACTORY)
def full_like(cx: Context, self: Any, fill_value: Any, **options: Any) -> Any:
    return filled(cx.out[0], fill_value)


@rule("new_full.default", OpClass.FACTORY)
def new_full(cx: Context, self: Any, size: Any, fill_value: Any, **options: Any) -> Any:
    return filled(cx.out[0], fill_value)


@rule(["fill.Scalar", "fill.Tensor"], OpClass.FACTORY)
def fill(cx: Context, self: Any, value: Any) -> Any:
    return filled(cx.out[0], value)


@rule("scalar_tensor.default", OpClass.FACTORY)
def scalar_tensor(cx: Context, s: Any, **options: Any) -> Any:
    return number(s, cx.out[0].dtype)


# --- ranges


def _wide(value: Any, spec: Spec) -> Any:
    # ATen counts in the accumulation type: 64 bits on either side, float16 and bfloat16 in float32.
    if not spec.dtype.is_floating_point:
        return number(value, torch.int64)
    return number(value, torch.float64 if spec.dtype.itemsize >= 4 else torch.float32)


def _progression(cx: Context, start: Any, step: Any) -> Any:
    spec = cx.out[0]
    first, step = _wide(start, spec), _wide(step, spec)
    place = lax.iota(first.dtype, spec.shape[0])
    total = first + step * place
    # XLA leaves out a start of 0.0, to which -1 * 0.0 is added.
    return where((place == 0) & (step < 0), first, total) if kind(total) == "f" else total


@rule("arange.default", OpClass.FACTORY, keep=["end"])
def arange(cx: Context, end: Any, **options: Any) -> Any:
    return _progression(cx, 0, 1)


@rule(["arange.start", "arange.start_step", "range.default", "range.step"], OpClass.FACTORY)
def arange_from(cx: Context, start: Any, end: Any, step: Any = 1, **options: Any) -> Any:
    return _progression(cx, start, step)


@variants
def leading_half(x: Any) -> Any:
    """The first half of the digits of float64 numbers."""
    bits = lax.bitcast_convert_type(x, np.int64) & np.asarray(-1 << 27, np.int64)
    return lax.bitcast_convert_type(bits, np.float64)


def _contracted(step: Any, place: Any, offset: Any) -> Any:
    """`step * place + offset` rounded once, as ATen's vector code computes it; XLA does so here and not there.

    float32 goes through float64, in which the product is exact; so are the two halves of a float64 step times a place.
    """
    if step.dtype == np.float32:
        wide = step.astype(np.float64) * place + offset.astype(np.float64)
        return wide.astype(np.float32)
    high = leading_half(step)
    product, rest = high * place, (step - high) * place
    total = offset + product
    # What the sum has lost (Knuth's two-sum).
    back = total - offset
    lost = (offset - (total - back)) + (product - back)
    return total + (lost + rest)


def _counted(steps: int) -> tuple[Any, Any, Any]:
    """For every position whether it is before the middle, and how far from the start and from the end, as float64."""
    place = lax.iota(np.int64, steps)
    return place < steps // 2, place.astype(np.float64), (steps - 1 - place).astype(np.float64)


def _between(spec: Spec, start: Any, end: Any, steps: int) -> Any:
    """Evenly spaced numbers, counted from both ends towards the middle as ATen does, not yet in the result's dtype."""
    dtype = spec.dtype
    if dtype.is_complex:
        parts = Spec(spec.shape, dtype.to_real(), spec.strides, spec.device)
        first, last = number(start, dtype), number(end, dtype)
        real, imag = (_between(parts, f(first), f(last), steps) for f in (np.real, np.imag))
        return lax.complex(real, imag)
    first, last = number(start, dtype), number(end, dtype)
    if not dtype.is_floating_point:
        first, last = first.astype(np.float64), last.astype(np.float64)
    first, last = upcast(first), upcast(last)
    if steps == 1:
        return lax.broadcast(first, (1,))
    # ATen computes in the result's dtype, so half types are rounded at every step.
    step = rounded(quotient(rounded(last - first, dtype), rounded(np.asarray(steps - 1, first.dtype), dtype)), dtype)
    is_first, forth, back = _counted(steps)
    if dtype.itemsize < 4 and dtype.is_floating_point:
        forth, back = (rounded(step * rounded(p.astype(first.dtype), dtype), dtype) for p in (forth, back))
        return where(is_first, first + forth, last - back)
    return where(is_first, _contracted(step, forth, first), _contracted(-step, back, last))


@rule(
    ["linspace.default", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor"],
    OpClass.FACTORY,
)
def linspace(cx: Context, start: Any, end: Any, steps: int, **options: Any) -> Any:
    return convert(_between(cx.out[0], start, end, steps), cx.out[0].dtype)


@rule(
    ["logspace.default", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor"],
    OpClass.FACTORY,
)
def logspace(cx: Context, start: Any, end: Any, steps: int, base: float = 10.0, **options: Any) -> Any:
    dtype = cx.out[0].dtype
    need(not dtype.is_complex, "complex powers are rounded by whoever computes them")
    # All but the difference of the ends is computed in float64.
    if steps == 1:
        exponents = lax.broadcast(number(start, torch.float64), (1,))
    else:
        first, last = number(start, dtype), number(end, dtype)
        span = rounded(upcast(last) - upcast(first), dtype) if dtype.is_floating_point else last - first
        first, last, span = (v.astype(np.float64) for v in (first, last, span))
        is_first, forth, back = _counted(steps)
        step = quotient(span, steps - 1)
        # Products that XLA may not make one instruction with the sums.
        forth, back = (lax.max(step * p, lax.full_like(p, np.finfo(np.float64).min)) for p in (forth, back))
        exponents = where(is_first, first + forth, last - back)
    # A base that is no constant: XLA's powers of 2 are others.
    powers = lax.pow(where(isnan(exponents), exponents, base), exponents)
    half = dtype.is_floating_point and dtype.itemsize < 4
    return convert(powers.astype(np.float32) if half else powers, dtype)


# --- matrices and coordinates


@rule(["eye.default", "eye.m"], OpClass.FACTORY)
def eye(cx: Context, n: int, m: int | None = None, **options: Any) -> Any:
    shape = cx.out[0].shape
    return lax.broadcasted_iota(np.int32, shape, 0) == lax.broadcasted_iota(np.int32, shape, 1)


# --- windows: functions of a position that runs from 0 to `length - 1`


def _window(cx: Context, length: int, periodic: bool, shape: Callable[[Any, int], Any]) -> Any:
    spec = cx.out[0]
    need(spec.dtype.itemsize >= 4, "ATen rounds a window to half precision at every step")
    dtype = JAX_DTYPE[spec.dtype]
    if length <= 1:
        return lax.full(spec.shape, 1, dtype)
    # A periodic window is the symmetric one of the next length without its last element.
    return shape(lax.iota(dtype, length), length if periodic else length - 1)


def _cosines(coefficients: tuple[float, ...]) -> Callable[[Any, int], Any]:
    def shape(place: Any, n: int) -> Any:
        terms = [
            np.asarray(c, place.dtype) * lax.cos(place * np.asarray(2 * math.pi * k / n, place.dtype))
            for k, c in enumerate(coefficients)
        ]
        return sum(terms[1:], terms[0])

    return shape


@rule(["hann_window.default", "hann_window.periodic"], OpClass.FACTORY)
def hann_window(cx: Context, window_length: int, periodic: bool = True, **options: Any) -> Any:
    return _window(cx, window_length, periodic, _cosines((0.5, -0.5)))


@rule(
    [f"hamming_window.{form}" for form in ("default", "periodic", "periodic_alpha", "periodic_alpha_beta")],
    OpClass.FACTORY,
)
def hamming_window(
    cx: Context, window_length: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any
) -> Any:
    return _window(cx, window_length, periodic, _cosines((alpha, -beta)))


@rule(["blackman_window.default", "blackman_window.periodic"], OpClass.FACTORY)
def blackman_window(cx: Context, window_length: int, periodic: bool = True, **options: Any) -> Any:
    return _window(cx, window_length, periodic, _cosines((0.42, -0.5, 0.08)))


@rule(["bartlett_window.default", "bartlett_window.periodic"], OpClass.FACTORY)
def bartlett_window(cx: Context, window_length: int, periodic: bool = True, **options: Any) -> Any:
    def triangle(place: Any, n: int) -> Any:
        rising = place * np.asarray(2.0 / n, place.dtype)
        return where(place <= n // 2, rising, 2 - rising)

    return _window(cx, window_length, periodic, triangle)


@rule(["kaiser_window.default", "kaiser_window.periodic", "kaiser_window.beta"], OpClass.FACTORY)
def kaiser_window(cx: Context, window_length: int, periodic: bool = True, beta: float = 12.0, **options: Any) -> Any:
    def i0(x: Any) -> Any:  # overflows where ATen's does
        return lax.exp(lax.abs(x)) * lax.bessel_i0e(x)

    def bell(place: Any, n: int) -> Any:
        along = (place - np.asarray(n / 2, place.dtype)) * np.asarray(2.0 / n, place.dtype)
        width = np.asarray(beta, place.dtype)
        return i0(width * lax.sqrt(1 - along * along)) / i0(lax.full_like(place, width))

    return _window(cx, window_length, periodic, bell)
