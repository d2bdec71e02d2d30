"""Whether what was timed tells the two ways apart, and which it says is faster. All by logarithms, which add up."""

from __future__ import annotations

import math

from .times import CLEAR

# Fused has to take less than this part of the native time: what the program holds goes to other memory after a context
# is entered, or a `sync()`, and back before the next: a third of a step, for an optimizer.
WORTH = 0.95


def gain(fused_s: float, native_s: float) -> float:
    """The logarithm of native's time over fused's, above 0 where fused is worth it."""
    return math.log(native_s / fused_s) + math.log(WORTH)


def is_worth(fused_s: float, native_s: float) -> bool:
    """Whether what runs so fast fused should."""
    return gain(fused_s, native_s) > 0


def is_clear(found: float, variance: float) -> bool:
    """Whether a `gain` is so far from 0 that more samples would not change its sign."""
    return abs(found) > CLEAR * math.sqrt(variance)
