"""A home: the canonical layout of a storage's value, dense and by rows, as its dtype and shape."""

from __future__ import annotations

import math
from typing import Any

import torch

from fused_eager.fusion_rules.spec import TORCH_DTYPE

Home = tuple[torch.dtype, tuple[int, ...]]


def nbytes_of(home: Home) -> int:
    """The bytes of a value."""
    return math.prod(home[1]) * home[0].itemsize


def home_of(array: Any) -> Home:
    """The dtype and shape of a JAX array."""
    return TORCH_DTYPE[array.dtype], tuple(array.shape)
