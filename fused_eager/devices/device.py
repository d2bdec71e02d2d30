"""The seam: what the runtime asks of a device, and of the buffers of its storages.

Recording, planning, compiling and running do not know which device they serve. A stream belongs to a device, and asks
it for whatever has to do with memory. There are two kinds: one that `has_memory`, whose tensors lie where ATen and
everybody else can get at them; and one that has not, whose storages are addresses that nobody maps.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fused_eager.fusion_rules.deferred import jax
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec

from ..xla import enable_x64
from .account import Account
from .buffer import Buffer, Table
from .home import Home

# Shape inference, ATen's rehearsals and the rules see every device's tensors as if they were the host's: what an op
# returns is what it returns there.
SEEN_AS = torch.device("cpu")


@functools.cache
def no_numbers(dtype: torch.dtype, on: Any) -> jax.Array:
    """A vector of no numbers on a device of JAX's: most regions are called with one."""
    with enable_x64(True):
        return jax.device_put(np.zeros(0, JAX_DTYPE[dtype]), on)


class Housekeeping:
    """What is done for the memory that regions take, around their runs and under the runtime's lock: here nothing, for
    a device whose memory is XLA's own affair."""

    @property
    def room(self) -> int | None:
        """Bytes that the temporaries of one region may take at once, as planning estimates them; None: any."""
        return None

    def lacks(self, needed: int) -> int | None:
        """The bytes that are free, if a region that takes so many at once should not run; None if it may."""
        return None

    def wastes(self, needed: int, plain: int) -> bool:
        """Whether a region takes so much more at once than the `plain` bytes of all its values that it is better run
        op by op."""
        return False

    def loaded(self) -> None:
        """An executable is about to be called for the first time."""

    def before_run(self) -> None:
        """A stream is about to be run."""

    def after_run(self) -> None:
        """Its regions are under way."""

    def compiled(self, long: bool) -> None:
        """Regions have been compiled, which leaves memory behind; much of it if it took `long`."""

    def turn(self) -> None:
        """From here on memory is used in another way: torch alone, or regions again."""

    def look(self, is_needed: Callable[[Buffer], bool], wait: Callable[[], None]) -> None:
        """Called after each flush: it may look whether there is something to be given back.

        Args:
            is_needed: whether what was in a storage's own memory before its value may be asked for again.
            wait: waits until all that has been started is done.
        """


class Device(ABC):
    """A device whose tensors are recorded.

    `name` is for people and events; `table` holds the buffers of its storages, by address.
    """

    name: str
    table: Table
    has_memory: bool  # its storages lie in the host's memory: ATen can run its ops in place
    link = float("inf")  # bytes in a second that go between it and the host's memory
    is_here = True  # it can run what is compiled for it
    housekeeping = Housekeeping()
    account: Account | None = None  # of its memory, where that is not the host's
    # Bytes from which on a result is given memory that is there already, if no dying input makes room for it; None: XLA
    # finds memory for all of them.
    scratch_from: int | None = None
    # Ops from which a region is cut into its equal layers: each is compiled once, and the cuts cost when it runs.
    layered_from = 128
    kin: tuple[Device, ...] = ()  # others that the same code runs on, once it is loaded for them

    @property
    @abstractmethod
    def xla(self) -> jax.Device:
        """The device that its regions are compiled for and run on, as JAX knows it."""

    @abstractmethod
    def holds(self, t: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""

    @abstractmethod
    def new(self, spec: Spec, nbytes: int) -> tuple[torch.Tensor, Buffer]:
        """A tensor whose value is still to come, with the buffer of its storage, which is in no table yet.

        Args:
            spec: the tensor's shape, strides and dtype.
            nbytes: of its storage, without gaps.
        """

    @abstractmethod
    def buffer(self, storage: torch.UntypedStorage) -> Buffer | None:
        """The buffer of a storage; None if its value is in the host's memory."""

    @abstractmethod
    def put(self, t: torch.Tensor) -> jax.Array:
        """A dense tensor of the host's, which nobody else writes, as a value of the device."""

    @abstractmethod
    def fetch(self, array: jax.Array) -> torch.Tensor:
        """A value of the device as a tensor of the host's that nobody may write. Waits until it is computed."""

    def send(self, array: jax.Array) -> None:  # noqa: B027 (nothing to do where the host has it)
        """Begin to bring an array to the host, which will ask for it."""

    @abstractmethod
    def numbers(self, numbers: Sequence[float | int], dtype: torch.dtype, kept: list[np.ndarray]) -> jax.Array:
        """Numbers as a vector on the device. What is put into `kept` has to outlive the run that reads it."""

    def told(self, error: Exception, where: str) -> Exception:
        """What the program is told of an error that came of running `where`, ops with their line."""
        return error

    def borrow(self, address: int, home: Home, anew: bool) -> jax.Array:
        """The value in the host's memory at an address, in place: an array of its own with `anew`, or else one that
        nobody may donate. The caller keeps the memory."""
        raise AssertionError(f"{self.name} has no values in the host's memory")

    def scratch(self, homes: Sequence[Home]) -> list[jax.Array]:
        """Memory for large results, to be donated at once."""
        raise AssertionError(f"{self.name} gives results no memory")

    def lend(self, array: jax.Array, storage: torch.UntypedStorage) -> None:  # noqa: B027 (nothing to do)
        """A storage has taken over the memory of a result."""
