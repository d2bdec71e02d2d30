"""What a value looks like from outside: `Spec`, and the dtypes that torch and JAX share.

A `Spec` is everything a lowering may know about a tensor. It never holds data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

# One row per dtype that both sides store bit for bit alike. What is missing here (complex32, quantized,
# packed bits) has no XLA type, so its ops run as islands.
JAX_DTYPE: dict[torch.dtype, np.dtype] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
}
TORCH_DTYPE: dict[np.dtype, torch.dtype] = {j: t for t, j in JAX_DTYPE.items()}


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, dtype, strides (in elements) and device of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    device: torch.device

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, self.shape))}]"


def spec_of(t: torch.Tensor) -> Spec:
    """The `Spec` of a strided tensor."""
    return Spec(tuple(t.shape), t.dtype, tuple(t.stride()), t.device)


def torch_dtype(x: Any) -> torch.dtype:
    """The torch dtype of a JAX array (or anything with a NumPy dtype)."""
    return TORCH_DTYPE[np.dtype(x.dtype)]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, by torch's convention that a size-0 dimension counts as size 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
