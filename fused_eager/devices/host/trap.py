"""The trap: a storage whose values are not there yet refuses every raw access, from any thread and any C++ code.

A pending tensor is an ordinary tensor over memory that nobody has written. Python-level reads are intercepted and
wait for the value, but nothing in Python sees a read by C++ code in a thread without our mode. torch itself has the
cure: a storage may be marked so that each access to its data pointer raises (FakeTensor and FunctionalTensor use
it). No Python binding sets the mark on CPU builds, so we set it where it lives (`devices.storage`), and `self_test`
proves the effect. View ops never touch the data pointer, so they work on a trapped storage.

What observes each op with its operands (`torch.profiler.profile(record_shapes=True)`, an execution trace) asks for the
data pointer too, to tell storages apart, and cannot do with an error: it loses its place among the operands. As long as
such is there storages are `labelled` instead. The pointer may be asked for, but not for writing, and it leads nowhere:
a bit is set in it that no address of a process has, on x86-64 or ARM. Whoever goes there ends the process, and reads no
garbage.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from .. import storage as storages
from ..storage import FLAGS_AT, MEMORY, POINTER_AT, storage_of

ARMED = b"\x01\x01\x01"
LABELLED = b"\x01\x01\x00"
CLEAR = b"\x00\x00\x00"
REFUSAL = "Cannot access data pointer of Storage that is invalid"  # torch's words; no other can be set from Python

# The seventh byte of a pointer, and its highest bit: bit 55. (ARM passes over the bits above it.)
_LABEL_AT = None if POINTER_AT is None or sys.byteorder != "little" else POINTER_AT + 6
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
        MEMORY[storage._cdata + _LABEL_AT] |= _LABEL
        MEMORY[at : at + 3] = LABELLED
    else:
        MEMORY[at : at + 3] = ARMED


def disarm(storage: torch.UntypedStorage) -> None:
    """Allow access again."""
    at = storage._cdata + FLAGS_AT
    if _labelled and _LABEL_AT is not None and MEMORY[at : at + 3] == LABELLED:
        MEMORY[storage._cdata + _LABEL_AT] &= ~_LABEL & 0xFF
    MEMORY[at : at + 3] = CLEAR


def is_armed(storage: torch.UntypedStorage) -> bool:
    """Whether access raises now, or goes where no memory is."""
    return ctypes.string_at(storage._cdata + FLAGS_AT, 3) in (ARMED, LABELLED)


def is_refusal(error: BaseException) -> bool:
    """Whether an error is that of an access which the trap has refused."""
    return isinstance(error, RuntimeError) and REFUSAL in str(error)


def address_of(storage: torch.UntypedStorage) -> int:
    """Where a storage's memory begins, trapped or not; 0 where that cannot be said."""
    if POINTER_AT is None:
        return 0
    address = bytearray(ctypes.string_at(storage._cdata + POINTER_AT, 8))
    if _labelled and _LABEL_AT is not None and bytes(MEMORY[_at(storage)]) == LABELLED:
        address[_LABEL_AT - POINTER_AT] &= ~_LABEL & 0xFF
    return int.from_bytes(address, sys.byteorder)


def _at(storage: torch.UntypedStorage) -> slice:
    return slice(storage._cdata + FLAGS_AT, storage._cdata + FLAGS_AT + 3)


def self_test() -> str | None:
    """None if the trap works with this torch, and what two storages hold can be exchanged, else what went wrong, in
    words."""
    return storages.self_test() or _test_of_traps()


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
