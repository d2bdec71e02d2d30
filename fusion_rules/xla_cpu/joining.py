"""Joining on XLA:CPU, which does not vectorise a fused concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .. import lower_shape

SHORT = 256  # elements of the last dimension


@lower_shape.joined.on("cpu")
def joined(parts: Sequence[Any], dim: int) -> Any:
    """Two float32 halves of a short last dimension side by side, anything else as XLA does it."""
    first, *others = parts
    is_last = dim == first.ndim - 1 and sum(p.shape[dim] for p in parts) <= SHORT
    if is_last and first.dtype == np.float32 and len(others) == 1 and first.shape == others[0].shape:
        return _side_by_side(first, others[0])
    return lax.concatenate(parts, dim)


def _side_by_side(a: Any, b: Any) -> Any:
    """Two float32 halves of a short last dimension: what rotary embeddings do to every query and key.

    Fused, a concatenation takes 0.6 ms for a million elements of heads of 128, against 0.24 ms
    for this. The bits are combined as integers, so that -0.0 and NaN stay what they are.
    """
    n, none = a.shape[-1], [(0, 0, 0)] * (a.ndim - 1)
    a, b = (lax.bitcast_convert_type(x, np.uint32) for x in (a, b))
    both = lax.pad(a, np.uint32(0), [*none, (0, n, 0)]) | lax.pad(b, np.uint32(0), [*none, (n, 0, 0)])
    return lax.bitcast_convert_type(both, np.float32)
