"""The trap: a storage whose values are not there yet refuses every raw access, from any thread and any C++ code.

A pending tensor is an ordinary tensor over memory that nobody has written. Python-level reads are intercepted and
wait for the value, but nothing in Python sees a read by C++ code in a thread without our mode. torch itself has the
cure: a storage may be marked so that each access to its data pointer raises (FakeTensor and FunctionalTensor use
it). No Python binding sets the mark on CPU builds, so we set it where it lives: three adjacent flags in `StorageImpl`
(`has_mutable_data_ptr_check_`, `throw_on_mutable_data_ptr_`, `throw_on_immutable_data_ptr_`). Their position is
found by watching `torch._C._set_throw_on_mutable_data_ptr` set the first two, and `self_test` proves the effect.
View ops never touch the data pointer, so they work on a trapped storage.

What observes each op with its operands (`torch.profiler.profile(record_shapes=True)`, an execution trace) asks for the
data pointer too, to tell storages apart, and cannot do with an error: it loses its place among the operands. As long as
such is there storages are `labelled` instead. The pointer may be asked for, but not for writing, and it leads nowhere:
a bit is set in it that no address of a process has, on x86-64 or ARM. Whoever goes there ends the process, and reads no
garbage.

Torch 2.13 can exchange what two storages hold; for older ones that is done here, where it lives as well.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np
import torch

ARMED = b"\x01\x01\x01"
LABELLED = b"\x01\x01\x00"
CLEAR = b"\x00\x00\x00"
REFUSAL = "Cannot access data pointer of Storage that is invalid"  # torch's words; no other can be set from Python
_STRUCT_BYTES = 120  # of StorageImpl; we look no further than its allocator pointer
_PROBES = 20

storage_of = torch._C.TensorBase.untyped_storage  # the unpatched accessors
pointer_of = torch.UntypedStorage.data_ptr  # what the trap refuses


def offset_of(t: torch.Tensor) -> int:
    """The storage offset in elements; never symbolic here."""
    return t.storage_offset()  # type: ignore[return-value]


class TrapUnavailable(RuntimeError):
    """This build of torch keeps its data-pointer flags elsewhere; without them unwritten memory could be read."""


def _find_flags() -> int:
    # More than once: the struct may be shorter than we look, and another thread change what lies behind it.
    for _ in range(_PROBES):
        probe = torch.empty(8)
        address = storage_of(probe)._cdata
        before = ctypes.string_at(address, _STRUCT_BYTES)
        torch._C._set_throw_on_mutable_data_ptr(probe)
        after = ctypes.string_at(address, _STRUCT_BYTES)
        changed = [i for i in range(_STRUCT_BYTES) if before[i] != after[i]]
        first = changed[0] if changed else -1
        if changed == [first, first + 1] and before[first : first + 3] == CLEAR:
            return first
    raise TrapUnavailable(f"torch {torch.__version__}: flag bytes found at {changed}, expected two neighbours")


def _find_pointer() -> int | None:
    probe = torch.empty(8)
    words = ctypes.string_at(storage_of(probe)._cdata, _STRUCT_BYTES)
    own = probe.data_ptr().to_bytes(8, sys.byteorder)
    return next((i for i in range(0, _STRUCT_BYTES, 8) if words[i : i + 8] == own), None)


FLAGS_AT = _find_flags()  # in `StorageImpl`, in bytes
_POINTER = _find_pointer()
# The process's memory as bytes: a slice of it is set five times as fast as by a call through ctypes.
_memory = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")


# The seventh byte of a pointer, and its highest bit: bit 55. (ARM passes over the bits above it.)
_LABEL_AT = None if _POINTER is None or sys.byteorder != "little" else _POINTER + 6
_LABEL = 0x80
_labels = False  # whether storages are labelled when they are trapped
_labelled = False  # whether any has ever been


def label(whether: bool) -> None:
    """From now on storages that are trapped are labelled, or are not; those that are trapped now stay as they are."""
    global _labels, _labelled
    _labels = whether and _LABEL_AT is not None
    _labelled = _labelled or _labels


def arm(storage: torch.UntypedStorage) -> None:
    """Make every access to the data of `storage` raise RuntimeError."""
    at = storage._cdata + FLAGS_AT
    if _labels and _LABEL_AT is not None:
        _memory[storage._cdata + _LABEL_AT] |= _LABEL
        _memory[at : at + 3] = LABELLED
    else:
        _memory[at : at + 3] = ARMED


def disarm(storage: torch.UntypedStorage) -> None:
    """Allow access again."""
    at = storage._cdata + FLAGS_AT
    if _labelled and _LABEL_AT is not None and _memory[at : at + 3] == LABELLED:
        _memory[storage._cdata + _LABEL_AT] &= ~_LABEL & 0xFF
    _memory[at : at + 3] = CLEAR


def is_armed(storage: torch.UntypedStorage) -> bool:
    """Whether access raises now, or goes where no memory is."""
    return ctypes.string_at(storage._cdata + FLAGS_AT, 3) in (ARMED, LABELLED)


def is_refusal(error: BaseException) -> bool:
    """Whether an error is that of an access which the trap has refused."""
    return isinstance(error, RuntimeError) and REFUSAL in str(error)


def address_of(storage: torch.UntypedStorage) -> int:
    """Where a storage's memory begins, trapped or not; 0 where that cannot be said."""
    if _POINTER is None:
        return 0
    address = bytearray(ctypes.string_at(storage._cdata + _POINTER, 8))
    if _labelled and _LABEL_AT is not None and bytes(_memory[_at(storage)]) == LABELLED:
        address[_LABEL_AT - _POINTER] &= ~_LABEL & 0xFF
    return int.from_bytes(address, sys.byteorder)


def _at(storage: torch.UntypedStorage) -> slice:
    return slice(storage._cdata + FLAGS_AT, storage._cdata + FLAGS_AT + 3)


def _swap(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    assert _POINTER is not None
    # From the memory, its owner and its size to the flags and the allocator: nothing in there knows where it lies.
    count = (FLAGS_AT + 4 + 7) // 8 * 8 + 8 - _POINTER
    at, other = a._cdata + _POINTER, b._cdata + _POINTER
    held = bytes(_memory[at : at + count])
    _memory[at : at + count] = _memory[other : other + count]
    _memory[other : other + count] = held


swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None]
swap_memory = getattr(torch.UntypedStorage, "_swap_data_ptr_", _swap)
"""Exchange the memory, sizes and flags of two storages of the same size, or one of none; views of either follow."""


def self_test() -> str | None:
    """None if the trap works with this torch, and what two storages hold can be exchanged, else what went wrong, in
    words."""
    return _test_of_swapping() or _test_of_traps()


def _test_of_swapping() -> str | None:
    if swap_memory is _swap and _POINTER is None:
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


def _test_of_traps() -> str | None:
    x = torch.arange(4.0)
    storage = storage_of(x)
    arm(storage)
    try:
        for name, access in (("read", lambda: x + 1), ("write", lambda: x.fill_(1)), ("pointer", x.data_ptr)):
            try:
                access()
            except RuntimeError:
                continue
            return f"a {name} of a trapped storage did not raise"
        x.view(2, 2).t()
    except RuntimeError as error:
        return f"a view of a trapped storage raised: {error}"
    finally:
        disarm(storage)
    return None if x.tolist() == [0.0, 1.0, 2.0, 3.0] else "a trapped storage lost its values"
