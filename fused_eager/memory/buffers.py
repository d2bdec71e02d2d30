"""Buffers: the storages whose current value is not in their memory.

A storage that nobody has touched through the runtime is *native*: its memory is the truth and no `Buffer` exists.
A `Buffer` exists from the first pending write until the value is bound to the storage again. In between the value is
*pending* (a position in a stream) or *on the device* (a JAX array, running or finished), and the storage is trapped.

The table holds storages, never tensors. A storage held by the table alone is dead: `is_alive` asks torch's own
reference count, and `sweep` forgets the dead, so nothing is computed for, or kept by, a tensor that has gone.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils.dlpack

from fused_eager.fusion_rules.deferred import xla_client
from fused_eager.fusion_rules.spec import JAX_DTYPE, contiguous_strides

from ..xla import device as xla_device
from . import trap, unwritten
from .borrow import Home, home_of, nbytes_of
from .scratch import SCRATCH
from .trap import pointer_of, storage_of, swap_memory

if TYPE_CHECKING:
    import jax

use_count = torch._C._storage_Use_Count


class Owner:
    """A stream, in which values are pending. May be referred to weakly although it has slots."""

    __slots__ = ("__weakref__",)


Table = dict[int, "Buffer"]  # by the storage's address
TABLE: Table = {}  # the host's
# One lock for the whole runtime: streams flush each other's work, and two locks taken in both orders are a deadlock.
LOCK = threading.RLock()


class Buffer:
    """A storage and the value it holds now. At most one of `stream` (pending), `array`, `error` says where it is; none
    does where ATen has put it into the storage's own memory while it was being recorded (`recording.shadow`).

    This is the host's; an accelerator's storages have buffers of its own kind.
    """

    table: ClassVar[Table] = TABLE

    __slots__ = (
        "__weakref__",
        "array",
        "born_native",
        "cdata",
        "epoch",
        "error",
        "home",
        "maker",
        "origin",
        "previous",
        "storage",
        "stream",
        "vacant",
        "vid",
    )

    def __init__(self, storage: torch.UntypedStorage, born_native: bool):
        self.storage = storage
        self.cdata = storage._cdata
        # Memory that the user may know by address (numpy views, data_ptr): the value must return to that memory.
        self.born_native = born_native
        self.stream: Owner | None = None
        self.epoch = -1
        self.vid = -1
        self.array: jax.Array | None = None
        self.home: Home | None = None
        self.origin: tuple[int, int] | None = None  # (run, value number) that made `array`
        self.maker: int | None = None  # the thread whose ops made the value
        self.error: BaseException | None = None
        self.previous: jax.Array | None = None  # the value to return to if the pending one cannot be computed
        self.vacant = False  # its own memory has gone back to the system

    @property
    def is_at_home(self) -> bool:
        """Whether the value is in the storage's own memory, and counts as one on the device all the same."""
        return self.stream is None and self.array is None and self.error is None

    def is_alive(self, held: int = 0) -> bool:
        """Whether a tensor, or anything but this table and `held` inputs of ours, still refers to the storage."""
        # One C++ reference is the Python object's own; its Python references are self.storage and the call's argument.
        return use_count(self.cdata) > 1 or sys.getrefcount(self.storage) > 2 + held

    def release(self) -> None:
        """Forget the buffer: its storage's memory is the truth from now on."""
        TABLE.pop(self.cdata, None)
        trap.disarm(self.storage)
        if not self.born_native:  # else it has memory; asking where would copy what torch shares until it is written
            _give_memory(self.storage)
        self.stream = self.array = None

    def lift(self) -> None:
        """Take the value of a buffer that is at home out of its storage, which receives memory that nobody has written:
        what `bind` undoes."""
        assert self.home is not None
        dtype, shape = self.home
        # The mark goes where the memory goes.
        value = unwritten.tensor(shape, contiguous_strides(shape), dtype, nbytes_of(self.home))
        try:
            swap_memory(self.storage, storage_of(value))
            self.array = to_array(value, xla_device())
        except BaseException:
            if self.array is None and trap.is_armed(self.storage):
                swap_memory(self.storage, storage_of(value))
            raise

    def bury(self) -> None:
        """Nobody refers to the storage any more."""
        SCRATCH.bury(self)
        self.array = None  # a run that has not been checked may hold the buffer for a while


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor has its values in a storage of its own, as nested and sparse ones have not."""
    return not t.is_nested and t.layout is torch.strided and torch._C._has_storage(t)


def buffer_of(t: torch.Tensor) -> Buffer | None:
    """The buffer of a tensor's storage; None if the storage is native."""
    return TABLE.get(storage_of(t)._cdata)


def open_buffer(storage: torch.UntypedStorage, born_native: bool) -> Buffer:
    """The buffer of a storage that is about to become pending; traps the storage."""
    found = TABLE.get(storage._cdata)
    if found is None:
        found = TABLE[storage._cdata] = Buffer(storage, born_native)
        trap.arm(storage)
    return found


def dead(buffers: list[Buffer]) -> list[Buffer]:
    """Those that are not alive, as `is_alive` says: at every flush all are looked at, and a call takes longer."""
    counted = sys.getrefcount
    return [b for b in buffers if not (use_count(b.cdata) > 1 or counted(b.storage) > 2)]


def sweep(table: Table = TABLE) -> None:
    """Forget the buffers on the device whose storages nobody refers to any more; large ones become scratch memory."""
    with LOCK:
        for b in dead([b for b in table.values() if b.stream is None]):
            del table[b.cdata]
            b.bury()
            # The storage dies with the last reference; until then nobody may read its unwritten memory.


# ---- memory across the border, without copies --------------------------------------------------------------------

_capsule = torch._C._to_dlpack
_from_capsule = torch._C._from_dlpack
_over_pointer = torch._C._construct_storage_from_data_pointer


def alias(storage: torch.UntypedStorage, offset_bytes: int, home: Home) -> torch.Tensor:
    """A contiguous tensor over part of a storage's memory that holds no reference to the storage.

    The caller keeps the storage alive for as long as the alias, or an array made of it, is in use.
    """
    dtype, shape = home
    n = 1
    for size in shape:
        n *= size
    raw = _over_pointer(pointer_of(storage) + offset_bytes, storage.device, n * dtype.itemsize)
    out = torch.empty(0, dtype=dtype, device=storage.device)
    return out.set_(raw, 0, shape, contiguous_strides(shape))  # type: ignore[arg-type]


def to_array(t: torch.Tensor, device: Any) -> jax.Array:
    """The memory of a contiguous tensor as a JAX array: no copy where alignment allows, exact dtype always."""
    return xla_client._xla.dlpack_managed_tensor_to_buffer(_capsule(t), device, None)


def to_tensor(array: jax.Array) -> torch.Tensor:
    """A JAX array as a tensor over the same memory. Waits until the array is computed."""
    return _from_capsule(xla_client._xla.buffer_to_dlpack_managed_tensor(array, stream=None))


COPIED = 2**16  # bytes: a small result is copied, so that torch can resize it as one of its own


def _give_memory(storage: torch.UntypedStorage) -> None:
    """Let a storage that is not trapped have memory, if it has only addresses."""
    if unwritten.holds(storage):
        swap_memory(storage, storage_of(torch.empty(storage.nbytes(), dtype=torch.uint8)))


def bind(buffer: Buffer) -> None:
    """Put a finished value into its storage and open the storage for everybody. Waits for the device.

    A storage that was native before keeps its address and receives a copy; one that was born pending takes over the
    device's memory.
    """
    array = buffer.array
    assert array is not None
    value = to_tensor(array)
    trap.disarm(buffer.storage)
    nbytes = buffer.storage.nbytes()
    if nbytes == 0:
        pass
    elif buffer.born_native or nbytes != value.numel() * value.dtype.itemsize:
        _give_memory(buffer.storage)
        alias(buffer.storage, 0, (value.dtype, tuple(value.shape))).copy_(value)
    elif nbytes <= COPIED:
        own = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        swap_memory(buffer.storage, storage_of(own))
    else:
        swap_memory(buffer.storage, storage_of(value))
        buffer.storage._fused_eager_memory = True  # type: ignore[attr-defined]
        SCRATCH.lend(array, buffer.storage)
    TABLE.pop(buffer.cdata, None)
    buffer.array = None


__all__ = [
    "JAX_DTYPE",
    "LOCK",
    "TABLE",
    "Buffer",
    "Home",
    "Table",
    "alias",
    "bind",
    "buffer_of",
    "dead",
    "home_of",
    "open_buffer",
    "storage_of",
    "sweep",
    "to_array",
    "to_tensor",
]
