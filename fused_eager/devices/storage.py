"""Storages as torch has them: where one is, what it holds, and two of them exchanging that.

The accessors are torch's own, which no context replaces. Some of what the runtime does to a storage has no binding in
Python: the flags that make an access to its data raise (`host.trap`), and, before torch 2.13, the exchange. That is
done where it lives, in `StorageImpl`. The positions of the flags (`has_mutable_data_ptr_check_`,
`throw_on_mutable_data_ptr_`, `throw_on_immutable_data_ptr_`) are found by watching
`torch._C._set_throw_on_mutable_data_ptr` set the first two.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np
import torch

from fused_eager.fusion_rules.spec import contiguous_strides

from .home import Home

_STRUCT_BYTES = 120  # of StorageImpl; we look no further than its allocator pointer
_PROBES = 20

storage_of = torch._C.TensorBase.untyped_storage  # the unpatched accessors
pointer_of = torch.UntypedStorage.data_ptr  # what the trap refuses
_over_pointer = torch._C._construct_storage_from_data_pointer


def offset_of(t: torch.Tensor) -> int:
    """The storage offset in elements; never symbolic here."""
    return t.storage_offset()  # type: ignore[return-value]


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor has its values in a storage of its own, as nested and sparse ones have not."""
    return not t.is_nested and t.layout is torch.strided and torch._C._has_storage(t)


def alias(storage: torch.UntypedStorage, offset_bytes: int, home: Home) -> torch.Tensor:
    """A contiguous tensor over part of a storage's memory that holds no reference to the storage.

    The caller keeps the storage alive for as long as the alias, or an array made of it, is in use.
    """
    return tensor_at(pointer_of(storage) + offset_bytes, home, storage.device)


def tensor_at(address: int, home: Home, device: torch.device) -> torch.Tensor:
    """The same over memory that begins at an address."""
    dtype, shape = home
    n = 1
    for size in shape:
        n *= size
    raw = _over_pointer(address, device, n * dtype.itemsize)
    out = torch.empty(0, dtype=dtype, device=device)
    return out.set_(raw, 0, shape, contiguous_strides(shape))  # type: ignore[arg-type]


class FlagsNotFound(RuntimeError):
    """This build of torch keeps its data-pointer flags elsewhere; without them unwritten memory could be read."""


def find_flags() -> int:
    """Where in `StorageImpl` the flags are, in bytes. Raises FlagsNotFound."""
    # More than once: the struct may be shorter than we look, and another thread change what lies behind it.
    for _ in range(_PROBES):
        probe = torch.empty(8)
        address = storage_of(probe)._cdata
        before = ctypes.string_at(address, _STRUCT_BYTES)
        torch._C._set_throw_on_mutable_data_ptr(probe)
        after = ctypes.string_at(address, _STRUCT_BYTES)
        changed = [i for i in range(_STRUCT_BYTES) if before[i] != after[i]]
        first = changed[0] if changed else -1
        if changed == [first, first + 1] and before[first : first + 3] == bytes(3):
            return first
    raise FlagsNotFound(f"torch {torch.__version__}: flag bytes found at {changed}, expected two neighbours")


def _find_pointer() -> int | None:
    probe = torch.empty(8)
    words = ctypes.string_at(storage_of(probe)._cdata, _STRUCT_BYTES)
    own = probe.data_ptr().to_bytes(8, sys.byteorder)
    return next((i for i in range(0, _STRUCT_BYTES, 8) if words[i : i + 8] == own), None)


FLAGS_AT = find_flags()
POINTER_AT = _find_pointer()  # where the address of its memory is, in bytes; None if it has not been found
# The process's memory as bytes: a slice of it is set five times as fast as by a call through ctypes.
MEMORY = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")


def _swap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    assert POINTER_AT is not None
    # From the memory, its owner and its size to the flags and the allocator: nothing in there knows where it lies.
    count = (FLAGS_AT + 4 + 7) // 8 * 8 + 8 - POINTER_AT
    at, other = a._cdata + POINTER_AT, b._cdata + POINTER_AT
    held = bytes(MEMORY[at : at + count])
    MEMORY[at : at + count] = MEMORY[other : other + count]
    MEMORY[other : other + count] = held


swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None]
swap_memory = getattr(torch.UntypedStorage, "_swap_data_ptr_", _swap)
"""Exchange the memory, sizes and flags of two storages of the same size, or one of none; views of either follow."""


def self_test() -> str | None:
    """None if what two storages hold can be exchanged with this torch, else what went wrong, in words."""
    if swap_memory is _swap and POINTER_AT is None:
        return "what two storages hold cannot be exchanged"
    own, borrowed = torch.arange(4.0), torch.from_numpy(np.ones(4, np.float32))  # which torch may not resize
    storages = storage_of(own), storage_of(borrowed)
    before = [_held(s) for s in storages]
    swap_memory(*storages)
    if [_held(s) for s in storages] != before[::-1]:
        return "two storages did not exchange what they hold"
    if own.tolist() != [1.0] * 4 or borrowed.tolist() != [0.0, 1.0, 2.0, 3.0]:
        return "two storages that exchanged what they hold lost their values"
    return None


def _held(s: torch.UntypedStorage) -> tuple[int, int, bool]:
    return pointer_of(s), s.nbytes(), s.resizable()
