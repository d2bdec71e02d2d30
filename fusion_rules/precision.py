"""How exact a contraction has to be: the accumulator's dtype, and torch's switches for reduced float32 products.

The switches are read while lowering, so whoever caches a lowering has to put `switches()` into its key.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from .deferred import jax, jnp, lax
from .platforms import variants
from .spec import JAX_DTYPE

# torch names a level, XLA an algorithm at least as exact: HIGH is tf32 on GPUs and three bfloat16 passes on TPUs.
LEVELS = {"highest": "HIGHEST", "high": "HIGH", "medium": "DEFAULT"}


_fixed = threading.local()

Switches = tuple[tuple[str, str], ...]


@contextmanager
def as_of(switches: Switches) -> Iterator[None]:
    """In the body, and in this thread, torch's switches are what `switches()` once returned."""
    before = getattr(_fixed, "switches", None)
    _fixed.switches = switches
    try:
        yield
    finally:
        _fixed.switches = before


def _fixed_to(name: str) -> str | None:
    switches = getattr(_fixed, "switches", None)
    return None if switches is None else dict(switches)[name]


# torch refuses to answer by the old names where a program also used the new ones; then only the new ones tell.
def _matmul_level() -> str:
    fixed = _fixed_to("float32_matmul_precision")
    if fixed is not None:
        return fixed
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def _cudnn_tf32() -> bool:
    fixed = _fixed_to("cudnn_tf32")
    if fixed is not None:
        return fixed == "True"
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]


def switches() -> Switches:
    """Everything that `matmul_precision` and `conv_precision` depend on, as names and values: one object for all times
    that they are the same. It is asked at every call of a compiled graph."""
    if getattr(_fixed, "switches", None) is None:
        with suppress(RuntimeError):  # of torch's, see above
            return _named(_level(), _tf32())
    return _named(_matmul_level(), _cudnn_tf32())


_level, _tf32 = torch._C._get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32


@functools.cache
def _named(level: str, tf32: bool) -> Switches:
    return ("float32_matmul_precision", level), ("cudnn_tf32", str(tf32))


def matmul_precision() -> lax.Precision:
    """The precision of float32 products in the matmul family (full unless torch's switch says otherwise)."""
    return lax.Precision[LEVELS[_matmul_level()]]


@variants
def conv_precision() -> lax.Precision:
    """The precision of float32 products in convolutions: that of the matmul family."""
    return matmul_precision()


@conv_precision.on("cpu")
def _full() -> lax.Precision:
    """Full, as in ATen."""
    return lax.Precision.HIGHEST


@conv_precision.on("gpu")
def _as_cudnn() -> lax.Precision:
    """torch allows tf32 in cuDNN's convolutions unless told not to."""
    return lax.Precision.HIGH if _cudnn_tf32() else lax.Precision.HIGHEST


def accumulator(dtype: torch.dtype | np.dtype | Any) -> np.dtype:
    """The dtype in which ATen sums products: float32 for half types, else the dtype itself."""
    have = JAX_DTYPE[dtype] if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    return np.dtype(np.float32) if have.itemsize == 2 and jnp.issubdtype(have, jnp.floating) else have


def rounded(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Float32 values rounded to a half type and held as float32, where ATen itself stores a half-type intermediate.

    A plain conversion there and back would be removed by XLA, which may keep excess precision. `reduce_precision` makes
    zeros of float16's subnormal numbers, which reach up to 6e-5: they are the multiples of the smallest one.
    """
    if dtype == torch.float16:
        units = lax.round(x * np.float32(2.0**24), lax.RoundingMethod.TO_NEAREST_EVEN)
        return jnp.where(lax.abs(x) < 2.0**-14, units * np.float32(2.0**-24), lax.reduce_precision(x, 5, 10))
    return lax.reduce_precision(x, 8, 7) if dtype == torch.bfloat16 else x
