"""Unwritten memory: what a pending tensor is laid over until its value comes.

It need not be memory. Taken from the heap it would be as much again as the values themselves, which then lie between
blocks that nobody has written, and move on to other pages in each step: the resident set of a small GPT in training
grew to 1.6 times what eager takes. So all pending tensors of some size share one range of addresses, reserved, with
nothing behind them. No torch code gets there, for the storage is trapped, and what is not torch's would end the
process rather than read garbage.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from array import array
from collections.abc import Callable
from typing import Any

import torch

from ..dlpack import CPU, MAX_DIMS, NOTHING, ManagedTensor, capsule, code_of, dtype_code, owned
from ..storage import pointer_of, storage_of
from . import trap
from .heap import libc

LEAST, MOST = 1 << 17, 1 << 36  # bytes: smaller tensors cost nothing to speak of; as many are reserved

KEPT = 4096  # descriptions, one for all tensors of a kind: none is let go of, for a tensor reads its own as it dies
_described: dict[Any, tuple[int, Any] | None] = {}
_from_capsule: Callable[[Any], torch.Tensor] = torch._C._from_dlpack  # type: ignore[attr-defined]


@functools.cache
def address() -> int:
    """Where the range begins; 0 where the system does not reserve any."""
    reserve = libc("mmap")
    if reserve is None:
        return 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = reserve(None, ctypes.c_size_t(MOST), 0, flags, -1, ctypes.c_long(0))  # neither to be read nor written
    return 0 if found in (None, ctypes.c_void_p(-1).value) else found


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """A new tensor that nobody may read or write before its storage has been given memory, and trapped until then.

    Args:
        shape, strides, dtype: its own.
        nbytes: of its storage, without gaps.
    """
    if LEAST <= nbytes <= MOST:
        key = shape, strides, dtype
        if key not in _described and len(_described) < KEPT:
            _described[key] = _description(*key)
        known = _described.get(key)
        taken = None if known is None else capsule(known[0])
        if key not in _described and _description(*key) is not None:
            taken = owned(address(), CPU, 0, shape, strides, dtype_code(dtype))
        if taken is not None:
            t = _from_capsule(taken)
            trap.arm(storage_of(t))
            return t
    t = torch.empty_strided(shape, strides, dtype=dtype)
    trap.arm(storage_of(t))
    return t


def _description(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> tuple[int, Any] | None:
    """The address of a description for DLPack, and what keeps it; None where it cannot be described."""
    if not address() or len(shape) > MAX_DIMS:
        return None
    try:
        code = code_of(dtype)
    except (RuntimeError, BufferError):
        return None
    numbers = array("q", (*shape, *strides, 0))
    sizes, _ = numbers.buffer_info()
    steps = sizes + numbers.itemsize * len(shape)
    made = ManagedTensor(address(), CPU, 0, len(shape), code, sizes, steps, 0, None, NOTHING)
    return ctypes.addressof(made), (made, numbers)


def holds(storage: torch.UntypedStorage) -> bool:
    """Whether a storage, which is not trapped, still has no memory of its own."""
    return storage.nbytes() >= LEAST and pointer_of(storage) == address() != 0
