"""The host's buffers: the storages whose current value is not in their memory, and how it gets there (**bind**).

A storage that nobody has touched through the runtime is *native*: its memory is the truth and no buffer exists. A
buffer exists from the first pending write until the value is bound to the storage again, and in between the storage is
trapped.
"""

from __future__ import annotations

import torch

from fused_eager.fusion_rules.spec import contiguous_strides

from ...xla import device as xla_device
from ..buffer import Buffer, Table
from ..dlpack import to_array, to_tensor
from ..home import nbytes_of
from ..storage import alias, storage_of, swap_memory
from . import trap, unwritten
from .scratch import SCRATCH

TABLE = Table()
COPIED = 2**16  # bytes: a small result is copied, so that torch can resize it as one of its own


class HostBuffer(Buffer):
    """A storage of the host, and the value it holds now."""

    table = TABLE

    __slots__ = ()

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

    def bind(self) -> None:
        """Put a finished value into its storage and open the storage for everybody. Waits for the device.

        A storage that was native before keeps its address and receives a copy; one that was born pending takes over the
        device's memory.
        """
        array = self.array
        assert array is not None
        value = to_tensor(array)
        trap.disarm(self.storage)
        nbytes = self.storage.nbytes()
        if nbytes == 0:
            pass
        elif self.born_native or nbytes != value.numel() * value.dtype.itemsize:
            _give_memory(self.storage)
            alias(self.storage, 0, (value.dtype, tuple(value.shape))).copy_(value)
        elif nbytes <= COPIED:
            own = torch.empty(value.shape, dtype=value.dtype).copy_(value)
            swap_memory(self.storage, storage_of(own))
        else:
            swap_memory(self.storage, storage_of(value))
            self.storage._fused_eager_memory = True  # type: ignore[attr-defined]
            SCRATCH.lend(array, self.storage)
        TABLE.pop(self.cdata, None)
        self.array = None

    def bury(self) -> None:
        """Nobody refers to the storage any more."""
        SCRATCH.bury(self)
        self.array = None  # a run that has not been checked may hold the buffer for a while


def buffer_of(t: torch.Tensor) -> Buffer | None:
    """The buffer of a tensor's storage; None if the storage is native."""
    return TABLE.get(storage_of(t)._cdata)


def open_buffer(storage: torch.UntypedStorage, born_native: bool) -> Buffer:
    """The buffer of a storage that is about to become pending; traps the storage."""
    found = TABLE.get(storage._cdata)
    if found is None:
        found = TABLE[storage._cdata] = HostBuffer(storage, born_native)
        trap.arm(storage)
    return found


def _give_memory(storage: torch.UntypedStorage) -> None:
    """Let a storage that is not trapped have memory, if it has only addresses."""
    if unwritten.holds(storage):
        swap_memory(storage, storage_of(torch.empty(storage.nbytes(), dtype=torch.uint8)))
