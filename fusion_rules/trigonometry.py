"""Sines and arcs, as XLA has them; XLA:CPU has better ones (`xla_cpu.trigonometry`)."""

from __future__ import annotations

from typing import Any

from jax import lax

from .elementwise import together
from .platforms import Variants


def _atan2(y: Any, x: Any) -> Any:
    return lax.atan2(*together(y, x))


sin, cos, tan, asin, acos, atan, atan2 = (
    Variants(f"trigonometry.{name}", any=function, why="loops that are vectorised")
    for name, function in {
        "sin": lax.sin, "cos": lax.cos, "tan": lax.tan, "asin": lax.asin, "acos": lax.acos, "atan": lax.atan,
        "atan2": _atan2,
    }.items()
)  # fmt: skip
