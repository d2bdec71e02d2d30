"""The small vocabulary that the pointwise lowerings share: broadcasting selects, torch's conversions, table rows.

Values are JAX arrays, or Python numbers where a decomposition passes them on. Everything is written in `lax`: the
`jnp` functions of the same names wrap each call in a function of its own, which is paid at every trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from torch.utils._python_dispatch import _disable_current_modes

from .lowering import Context, NoLowering, cast, computation_dtype
from .platforms import variants
from .precision import rounded
from .rule import OpClass, Promote, rule
from .spec import JAX_DTYPE

NUMBERS = (bool, int, float, complex)


def is_one(x: Any) -> bool:
    """Whether `x` is a Python number equal to 1 (a hoisted scalar never is: its value is not known here)."""
    return isinstance(x, (bool, int, float)) and x == 1


def kind(x: Any) -> str:
    """One letter for an array's dtype: b(ool), u(nsigned), i(nteger), f(loat, bfloat16 too), c(omplex)."""
    dtype = np.dtype(x.dtype)
    return "f" if jnp.issubdtype(dtype, jnp.floating) else dtype.kind


def as_array(x: Any, dtype: Any) -> Any:
    """`x` as an array of a NumPy dtype. Python integers wrap around, as a C cast would."""
    if isinstance(x, NUMBERS):
        if isinstance(x, int) and np.dtype(dtype).kind in "iu":
            return np.asarray(x & (2**64 - 1), np.uint64).astype(dtype)
        return np.asarray(x).astype(dtype)
    return cast(x, dtype)


OPAQUE = Primitive("elementwise")
OPAQUE.def_impl(lambda x, function: function(x))
OPAQUE.def_abstract_eval(lambda x, function: x)
mlir.register_lowering(OPAQUE, mlir.lower_fun(lambda x, function: function(x), multiple_results=False))


def elementwise(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that computes each number of an array from that number alone, as a primitive of its own: whoever goes
    through a traced function need not find that out of what is in it. It may take several passes over the array."""
    return lambda x: OPAQUE.bind(x, function=function)


def spread(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast an array to `shape` by NumPy's rule."""
    if tuple(x.shape) == shape:
        return x
    return lax.broadcast_in_dim(x, shape, tuple(range(len(shape) - x.ndim, len(shape))))


def shape_of(*xs: Any) -> tuple[int, ...]:
    """The shape that arrays and numbers broadcast to."""
    return np.broadcast_shapes(*(np.shape(x) for x in xs))


def together(*xs: Any) -> tuple[Any, ...]:
    """Arrays broadcast to one shape; Python numbers take the dtype of the first array."""
    dtype = next(x.dtype for x in xs if not isinstance(x, NUMBERS))
    shape = shape_of(*xs)
    return tuple(spread(as_array(x, dtype) if isinstance(x, NUMBERS) else x, shape) for x in xs)


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where a bool array is true, else `b`; one of the two may be a Python number."""
    shape = shape_of(condition, a, b)
    a, b = together(a, b)
    return lax.select(spread(condition, shape), spread(a, shape), spread(b, shape))


@variants
def hidden(x: Any, beside: Any = None) -> Any:
    """`x`, behind a barrier for XLA's algebra, which is gone before loops are fused, so it costs nothing."""
    return lax.optimization_barrier(x)


def divide(x: Any, y: Any) -> Any:
    """`x / y` for floats, correctly rounded, and for complex numbers as eager rounds it.

    XLA would multiply by the reciprocal of a divisor that it sees to be broadcast: 49 / 49 is less than 1 then, and
    x / 1e38 is 0. And of `x / a / b` it would make `x / (a * b)`, where the product may be 0 or infinite. Hidden from
    it they are arrays like any others.
    """
    x, y = together(x, y)
    if kind(x) == "c":
        return _complex_quotient(x, y)
    return lax.div(hidden(x), hidden(y, x))


def _complex_quotient(x: Any, y: Any) -> Any:
    """Smith's way with one reciprocal, as eager has it (R. L. Smith, Algorithm 116, CACM 1962): to the bit where both
    contract products into the sums that take them, as compilers do for processors that can."""
    (a, b), (c, d) = ((lax.real(z), lax.imag(z)) for z in (x, y))
    by_real = lax.abs(c) >= lax.abs(d)
    larger, smaller = where(by_real, c, d), where(by_real, d, c)
    own, other = where(by_real, a, b), where(by_real, b, a)
    ratio = divide(smaller, larger)
    scale = divide(jnp.ones_like(larger), larger + smaller * ratio)
    real = (own + other * ratio) * scale
    rest = other - own * ratio  # once: a product that is taken twice is not contracted
    imaginary = where(by_real, rest, 0 - rest) * scale
    # Zero divides each part by itself: infinity or NaN.
    is_zero = (c == 0) & (d == 0)
    by_zero = (divide(part, jnp.zeros_like(part)) for part in (a, b))
    return lax.complex(*(where(is_zero, z, part) for z, part in zip(by_zero, (real, imaginary), strict=True)))


def product(x: Any, y: Any) -> Any:
    """`x * y`, with the rounding of eager's vector code for complex numbers: each of the four products by itself.

    XLA contracts one of two products with the sum that takes it, and `z * z.conj()` is not real then. What is selected,
    here NaN where a product is NaN already, is not contracted; a million complex64 take no longer for it. Where there
    are too few complex128 for a vector eager contracts as well, the first of the two.
    """
    if not _is_complex(x) and not _is_complex(y):
        return x * y
    x, y = together(x, y)
    contracts = x.dtype == np.complex128 and x.size < 4
    (a, b), (c, d) = ((lax.real(z), lax.imag(z)) for z in (x, y))
    ac, ad = (p if contracts else where(p == p, p, np.nan) for p in (a * c, a * d))
    bd, bc = (where(p == p, p, np.nan) for p in (b * d, b * c))
    return lax.complex(ac - bd, ad + bc)


def _is_complex(x: Any) -> bool:
    return isinstance(x, complex) if isinstance(x, NUMBERS) else kind(x) == "c"


def isnan(x: Any) -> Any:
    """Where a float or complex array is NaN; all false for integers."""
    return x != x


def maximum(a: Any, b: Any) -> Any:
    """The larger of two, NaN if either is. Of 0.0 and -0.0 the second, as x86 and so eager has it (`lax.max`: 0.0)."""
    a, b = together(a, b)
    return lax.select((a > b) | isnan(a), a, b) if kind(a) == "f" else lax.max(a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two, with the rules of `maximum`."""
    a, b = together(a, b)
    return lax.select((a < b) | isnan(a), a, b) if kind(a) == "f" else lax.min(a, b)


def is_negative(x: Any) -> Any:
    """The sign bit of a float array, -0.0 and NaN included."""
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * np.dtype(x.dtype).itemsize}"))
    return bits < 0


def copysign(magnitude: Any, sign: Any) -> Any:
    """`magnitude` with the sign bit of `sign`; both float arrays of one dtype."""
    magnitude, sign = together(magnitude, sign)
    dtype = np.dtype(magnitude.dtype)
    word = np.dtype(f"uint{8 * dtype.itemsize}")
    top = np.asarray(1 << (8 * dtype.itemsize - 1), word)
    bits = (lax.bitcast_convert_type(magnitude, word) & ~top) | (lax.bitcast_convert_type(sign, word) & top)
    return lax.bitcast_convert_type(bits, dtype)


def polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Horner's scheme, highest power first."""
    total = as_array(coefficients[0], x.dtype)
    for c in coefficients[1:]:
        total = total * x + as_array(c, x.dtype)
    return total


def convert(x: Any, dtype: torch.dtype) -> Any:
    """Convert an array to a torch dtype with the results of eager on x86.

    Complex to real drops the imaginary part. Float to integer truncates; what does not fit (NaN, infinity, too
    large) becomes the register's smallest value, which narrower types then cut down to their low bits. XLA alone
    would saturate, and turn NaN into 0.
    """
    want = JAX_DTYPE[dtype]
    if x.dtype == want:
        return x
    if kind(x) == "c" and want.kind not in "cb":
        x = x.real
    if kind(x) == "f" and want.kind in "iu":
        return _truncate(x, want)
    if dtype == torch.float8_e4m3fn and kind(x) == "f" and _stops_at_the_largest():
        x = where(x > 448, 448, where(x < -448, -448, x))
    return cast(x, want)


@functools.cache
def _stops_at_the_largest() -> bool:
    """Whether torch makes the largest float8_e4m3fn of what is beyond it, as 2.13 does; it has no infinity. 2.11 makes
    NaN of it, as XLA does."""
    with _disable_current_modes():
        return not torch.tensor(1e6).to(torch.float8_e4m3fn).isnan().item()


@functools.cache
def torch_makes_nan(function: Callable[..., torch.Tensor], numbers: tuple[float, ...], dtype: torch.dtype) -> bool:
    """Whether torch's vector code makes NaN of numbers of which its code for single ones makes none.

    Which it is differs by dtype, processor and version, and with both in the same tensor: the last few numbers of a
    row are computed one by one. Where either answers NaN, so do we: a model that has diverged has to show it.
    """
    with _disable_current_modes():
        return bool(function(*(torch.full((64,), number, dtype=dtype) for number in numbers))[0].isnan())


def _truncate(x: Any, want: np.dtype) -> Any:
    # Which register an x86 conversion goes through, by dtype (uint8 through 64 bits, as c10::convert does).
    register = np.int32 if want in (np.int32, np.int16, np.int8, np.uint16) else np.int64
    top = 2.0**31 if register is np.int32 else 2.0**63
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    limit = as_array(top, x.dtype)
    whole = where((x >= -limit) & (x < limit), x.astype(register), np.asarray(-top, register))
    if want == np.uint64:
        high = (x - limit).astype(np.int64) ^ np.asarray(-top, np.int64)
        whole = where(x >= limit, where(x < 2 * limit, high, 0), whole)
    return whole.astype(want)


def narrow(cx: Context, x: Any) -> Any:
    """A value rounded to the dtype of the result but kept in the computation's: what eager's own rounding leaves."""
    dtype = cx.out[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return x
    if isinstance(x, NUMBERS):
        return float(np.asarray(x).astype(JAX_DTYPE[dtype]))
    return rounded(x, dtype) if kind(x) == "f" else x


def narrow_number(cx: Context, x: Any) -> Any:
    """A number (0-d array or Python's) as most kernels take it: in the dtype of the tensor that it meets."""
    return x if np.ndim(x) else narrow(cx, x)


def by_tensors(tensors: Sequence[Any], *numbers: Any) -> tuple[Any, ...]:
    """Tensors promoted among themselves, and numbers (0-d arrays or Python's) cast to the dtype that these compute in.

    Many kernels take their numbers so: among integers 0.5 is 0. The row asks for no promotion, in which a fraction
    would make floats of integers, too short for the large ones.
    """
    dtype = computation_dtype(list(tensors), {}, Promote.DEFAULT)
    return tuple(convert(x if hasattr(x, "dtype") else np.asarray(x), dtype) for x in (*tensors, *numbers))


def need(condition: bool, reason: str) -> None:
    """Decline the op unless `condition`.

    Raises:
        NoLowering: the condition does not hold.
    """
    if not condition:
        raise NoLowering(reason)


def enter_unary(table: Mapping[str, Callable[[Any], Any]], promote: Promote, suffix: str = "default") -> None:
    """One row `name.suffix(self)` per entry."""
    for name, function in table.items():

        def lower(cx: Context, self: Any, function: Callable[[Any], Any] = function) -> Any:
            return function(self)

        rule(f"{name}.{suffix}", OpClass.POINTWISE, promote=promote)(lower)


def enter_binary(
    table: Mapping[str, Callable[[Any, Any], Any]], promote: Promote, suffixes: tuple[str, ...] = ("default",)
) -> None:
    """One row `name.suffix(self, other)` per entry and suffix."""
    for name, function in table.items():

        def lower(cx: Context, self: Any, other: Any, function: Callable[[Any, Any], Any] = function) -> Any:
            return function(self, other)

        rule([f"{name}.{suffix}" for suffix in suffixes], OpClass.POINTWISE, promote=promote)(lower)
