"""Masks that are drawn once, for a TPU: XLA draws them again in every loop that reads them.

Threefry takes some 120 operations for a number. A mask of dropout is read by the loop that it is for, and once or twice
in the backward pass; as a value of its own it takes a byte for each number, and is drawn for all of them.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from ..lower_random import computed_once


@computed_once.on("tpu")
def behind_a_barrier(mask: Any) -> Any:
    return lax.optimization_barrier(mask)
