"""Elementary functions that XLA:CPU computes number by number, in forms that it vectorises."""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from .. import lower_elementary
from ..elementwise import as_array, kind, where
from ..lower_elementary import reciprocal


@lower_elementary.rsqrt.on("cpu")
def rsqrt(x: Any) -> Any:
    """`1 / sqrt(x)`. XLA does not vectorise its own, and takes a quotient by a root for one: ten times as slow."""
    if kind(x) != "f":
        return lax.rsqrt(x)
    quotient = reciprocal(x)
    # Of -0.0 it is -inf, of -inf nan.
    return where(x == 0, quotient, where(x < 0, as_array(math.nan, x.dtype), lax.sqrt(quotient)))
