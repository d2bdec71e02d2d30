"""The host as a device: CPU tensors in place, in memory that ATen and everybody else can get at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fused_eager.fusion_rules.deferred import jax
from fused_eager.fusion_rules.spec import Spec

from ...xla import device, inline
from ..buffer import Buffer
from ..device import Device, no_numbers
from ..dlpack import ALIGNED, to_array, to_tensor
from ..home import Home
from ..storage import storage_of
from . import heap, scratch, unwritten
from .borrow import borrow, borrow_again
from .buffers import TABLE, HostBuffer
from .housekeeping import HOUSEKEEPING, HostHousekeeping


class Host(Device):
    """CPU tensors. A storage that nobody has touched through the runtime has no buffer: its memory is the truth."""

    table = TABLE
    has_memory = True
    housekeeping: HostHousekeeping

    def __init__(self, name: str, xla: Callable[[], jax.Device], housekeeping: HostHousekeeping) -> None:
        self.name, self._xla, self.housekeeping = name, xla, housekeeping

    @property
    def scratch_from(self) -> int | None:  # type: ignore[override]
        """What the system would be asked for each time."""
        return scratch.LARGE

    @property
    def xla(self) -> jax.Device:
        """What computes on the host's memory."""
        return self._xla()

    def holds(self, t: torch.Tensor) -> bool:
        """Whether a tensor lies in the host's memory."""
        return t.is_cpu

    def new(self, spec: Spec, nbytes: int) -> tuple[torch.Tensor, Buffer]:
        """A tensor over memory that nobody has written, trapped."""
        t = unwritten.tensor(spec.shape, spec.strides, spec.dtype, nbytes)
        return t, HostBuffer(storage_of(t), born_native=False)

    def buffer(self, storage: torch.UntypedStorage) -> Buffer | None:
        """The buffer of a storage, if its value is not in its memory."""
        return TABLE.get(storage._cdata)

    def put(self, t: torch.Tensor) -> jax.Array:
        """The tensor's memory as an array: no copy where alignment allows."""
        return to_array(t, self.xla)

    def fetch(self, array: jax.Array) -> torch.Tensor:
        """The array's memory as a tensor."""
        return to_tensor(array)

    def numbers(self, numbers: Sequence[float | int], dtype: torch.dtype, kept: list[np.ndarray]) -> jax.Array:
        """An array over memory that is put into `kept`."""
        if not numbers:
            return no_numbers(dtype, self.xla)
        room = np.empty(len(numbers) + ALIGNED // 8 - 1, _NUMPY[dtype])
        address = room.ctypes.data
        skipped = -address % ALIGNED // 8
        room[skipped : skipped + len(numbers)] = numbers
        kept.append(room)
        return borrow(address + 8 * skipped, (dtype, (len(numbers),)), self.xla)

    def borrow(self, address: int, home: Home, anew: bool) -> jax.Array:
        """The memory as an array, without a copy where alignment allows."""
        return borrow(address, home, self.xla) if anew else borrow_again(address, home, self.xla)

    def unwritten(self, home: Home) -> torch.Tensor:
        """Memory for a value, which nobody has written."""
        return heap.unwritten(home[1], home[0])

    def scratch(self, homes: Sequence[Home]) -> list[jax.Array]:
        """Memory of results that have died, or zeros."""
        return [self.housekeeping.scratch.take(home) for home in homes]

    def lend(self, array: jax.Array, storage: torch.UntypedStorage) -> None:
        """A storage has taken over the memory of a result."""
        self.housekeeping.scratch.lend(array, storage)


_NUMPY = {torch.float64: np.float64, torch.int64: np.int64}

HOST = Host("cpu", device, HOUSEKEEPING)
# The same for whoever waits: it runs on the caller's thread.
INLINE = Host("cpu, inline", inline, HostHousekeeping(scratch.Scratch(inline)))
HOST.kin, INLINE.kin = (INLINE,), (HOST,)
SMALL = 16 << 20  # bytes


def for_caller(nbytes: int) -> Host:
    """The host for a caller who waits for what has values of so many bytes.

    What is large runs so long that waking another thread is nothing beside it, and perhaps under the runtime's lock,
    for which other threads wait.
    """
    return INLINE if nbytes < SMALL else HOST
