"""An accelerator: tensors whose storages have no memory of the host's, a JAX array each.

A storage is a range of addresses that nobody maps, so that each has an identity (`data_ptr` tells tied weights apart)
and whoever goes there ends the process rather than read garbage. Its buffer is there from the first to the last and is
never bound to anything: its value is pending in the device's stream or an array on the device. A storage that nobody
has written yet holds zeros, which are made once somebody reads them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch

from fused_eager.fusion_rules.spec import JAX_DTYPE, TORCH_DTYPE, Spec

from ..bounded import Bounded
from ..log import site
from ..ranks import job
from ..xla import device as host_device
from ..xla import enable_x64, pxla
from .account import Account
from .arrivals import EXPECTED, await_storage
from .buffer import LOCK, Buffer, Table
from .device import Device, Housekeeping, no_numbers
from .dlpack import ACCELERATOR, dtype_code, owned, to_array, to_tensor
from .exhausted import is_of_memory, out_of_memory
from .home import Home, nbytes_of
from .host.housekeeping import HOUSEKEEPING
from .storage import pointer_of, storage_of

FIRST = 1 << 47  # no address of a process on x86-64 or ARM is as high
MOST = 1 << 50  # bytes of a storage: a thousand times what any machine has
LINK = 4e9  # bytes in a second that a bus carries, one way, from memory that is not pinned
_ALIGNED = 64  # bytes, as torch's own allocators have it

_from_capsule = torch._C._from_dlpack


class AcceleratorBuffer(Buffer):
    """A storage of an accelerator, and its value."""

    __slots__ = ("device", "table")

    def __init__(self, storage: torch.UntypedStorage, device: Accelerator, home: Home):
        super().__init__(storage, born_native=False)
        self.device = device
        self.table = device.table  # type: ignore[misc]
        self.home = home

    def release(self) -> None:
        """Forget the value, whatever it is: the storage is as if nobody had written it."""
        self.stream = self.array = self.previous = self.error = None

    def lift(self) -> None:
        """Make the zeros that a storage holds which nobody has written."""
        assert self.home is not None
        try:
            make = unpaged if self.device.is_valueless else zeros
            self.array = make(self.home, self.device.xla)
        except RuntimeError as error:
            self.device.fail(error, f"a tensor read at {site.describe(site.here())}")

    def bind(self) -> None:
        """Nothing: whoever reads it asks us."""

    def bury(self) -> None:
        """Nobody refers to the storage any more."""
        self.array = None


class Accelerator(Device):
    """The device `index` of a type that torch knows as PrivateUse1, on a device that JAX has."""

    has_memory = False
    is_a_target = False  # what the CPU stands in for is a target's: it plans as that would
    is_valueless = False  # nothing is computed on it: each value is zeros without memory

    def __init__(self, type: str, index: int, xla: jax.Device):
        self.name = f"{type}:{index}"
        self.type, self.index = type, index
        self.table = Table()
        self._xla = xla
        self._is_host = xla.platform == "cpu"
        self._numbers: Bounded[tuple[torch.dtype, bytes], jax.Array] = Bounded(256)
        self.link = float("inf") if self._is_host else LINK
        self.account: Account = Account()

    @property
    def housekeeping(self) -> Housekeeping:  # type: ignore[override]
        """The host's where the CPU stands in, for then regions take its memory."""
        return HOUSEKEEPING if self._is_host and not self.is_a_target else super().housekeeping

    @property
    def layered_from(self) -> int:  # type: ignore[override]
        """On a TPU, layers that are cut apart hand each other what else never leaves the chip: a Llama of four took
        45 % longer by its compiler's analysis."""
        is_a_tpu = self._xla.platform == "tpu" or self.is_a_target
        return 640 if is_a_tpu else Device.layered_from

    @property
    def xla(self) -> jax.Device:
        """The device of JAX's that does the work."""
        return self._xla

    def holds(self, t: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""
        return t.get_device() == self.index and t.device.type == self.type

    def new(self, spec: Spec, nbytes: int) -> tuple[torch.Tensor, Buffer]:
        """A tensor over new addresses."""
        t = self.empty(spec.shape, spec.strides, spec.dtype)
        return t, AcceleratorBuffer(storage_of(t), self, (spec.dtype, spec.shape))

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over new addresses, whose storage has no buffer yet."""
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
        nbytes = reach * dtype.itemsize
        if nbytes > MOST:
            self._refuse(nbytes, shape, strides)
        address = take(nbytes)
        return _from_capsule(owned(address, ACCELERATOR, self.index, shape, strides, dtype_code(dtype)))

    def _refuse(self, nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NoReturn:
        """Torch's error for more bytes than 63 bits count, and no memory for what no machine has: addresses would run
        out, and what torch raises about a capsule ends the process."""
        if nbytes >= 1 << 63:
            raise RuntimeError(
                f"Storage size calculation overflowed with sizes={list(shape)} and strides={list(strides)}"
            )
        raise self.told(MemoryError(f"out of memory allocating {nbytes} bytes"), str(site.describe(site.here())))

    def buffer(self, storage: torch.UntypedStorage) -> Buffer:
        """The buffer of a storage, made where there is none yet."""
        if EXPECTED:
            await_storage(storage)
        found = self.table.get(storage._cdata) or self._at(storage)
        if found is None:
            home = torch.uint8, (storage.nbytes(),)
            found = self.table[storage._cdata] = AcceleratorBuffer(storage, self, home)
        return found

    def _at(self, storage: torch.UntypedStorage) -> Buffer | None:
        """The buffer of the storage at the same address: torch looks at storages through others that it lays over them
        (what pickle reads and writes)."""
        address = pointer_of(storage)
        if not address:
            return None
        return next((b for b in self.table.values() if pointer_of(b.storage) == address), None)

    def put(self, t: torch.Tensor) -> jax.Array:
        """A dense tensor of the host's as an array: a copy, except where the host's memory is the device's."""
        array = to_array(t, self._xla if self._is_host else host_device())
        try:
            return array if self._is_host else moved(array, self._xla)
        except _NO_ROOM as error:
            self.fail(error, f"what is brought to it at {site.describe(site.here())}")

    def told(self, error: Exception, where: str) -> Exception:
        """An error that speaks of memory as torch's own, which names the largest tensors; and one of a collective that
        was under way as what has become of the rank that it waited for."""
        if not is_of_memory(error):
            return job.explain(error, f"needs {where}")  # type: ignore[return-value] # as the error is
        self.account.exhausted += 1
        return out_of_memory(error, self.name, self.table, where)

    def fail(self, error: Exception, where: str) -> NoReturn:
        """Raise an error, which is being handled, as `told` has it. (Raised from itself it would keep itself alive.)"""
        told = self.told(error, where)
        try:
            if told is error:
                raise error
            raise told from error
        finally:
            del told, error  # this frame is in its traceback: they would keep each other

    def fetch(self, array: jax.Array) -> torch.Tensor:
        """The value as a tensor: a copy, except where the host's memory is the device's."""
        try:
            if self._is_host:
                return to_tensor(array)
            if array.nbytes <= LITTLE:
                return _copied(np.asarray(array))
            array.block_until_ready()  # raises what it has failed with, before the host is asked for as much memory
            return to_tensor(moved(array, host_device()))
        except _NO_ROOM as error:  # of what has run meanwhile
            self.fail(error, f"what is read at {site.describe(site.here())}")

    def send(self, array: jax.Array) -> None:
        """The way back takes longer than most regions: it is gone while the program goes on."""
        if not self._is_host:
            array.copy_to_host_async()

    def numbers(self, numbers: Sequence[float | int], dtype: torch.dtype, kept: list[np.ndarray]) -> jax.Array:
        """A copy of the numbers on the device. Most come again and again, and bringing them takes longer than an op."""
        if not numbers:
            return no_numbers(dtype, self._xla)
        vector = np.array(numbers, JAX_DTYPE[dtype])
        key = dtype, vector.tobytes()  # two that are equal may differ: 0 and -0
        found = self._numbers.get(key)
        if found is None:
            found = _placed(vector, self._xla)
            if len(numbers) <= _FEW:
                self._numbers[key] = found
        return found


_NO_ROOM = (RuntimeError, MemoryError)  # among others: `told` looks which


LITTLE = 1 << 16  # bytes: what a program reads in each step, where two of JAX's arrays take longer than a copy


def _copied(array: np.ndarray) -> torch.Tensor:
    """The same numbers as a tensor of its own."""
    made = torch.empty(array.shape, dtype=TORCH_DTYPE[array.dtype], device="cpu")
    if array.nbytes:
        ctypes.memmove(made.data_ptr(), np.ascontiguousarray(array).ctypes.data, array.nbytes)
    return made


def moved(array: jax.Array, to: Any) -> jax.Array:
    """An array on another of JAX's devices. All 64 bits of its numbers, whatever the program has told JAX."""
    with enable_x64(True):
        return jax.device_put(array, to)


def shaped(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """An array in another shape, where it is: JAX brings what a region made to its default device to compute."""
    if array.shape == tuple(shape):
        return array
    (device,) = array.devices()
    with enable_x64(True), jax.default_device(device):
        return array.reshape(tuple(shape))


@functools.lru_cache(maxsize=256)
def _placement(dtype: np.dtype, count: int, device: Any) -> tuple[Any, Any]:
    return jax.core.ShapedArray((count,), dtype), jax.sharding.SingleDeviceSharding(device)


def _placed(vector: np.ndarray, device: Any) -> jax.Array:
    """`jax.device_put` of a vector that nobody writes, which looks at it from all sides first: ten times as long."""
    aval, sharding = _placement(vector.dtype, len(vector), device)
    with enable_x64(True):
        return pxla.batched_device_put(aval, sharding, [vector], [device])


_FEW = 64  # numbers that are kept on the device for the next time
_free = [FIRST]  # the first address that nobody has had


def take(nbytes: int) -> int:
    """The first of so many addresses that nobody else has had; 0 for none."""
    if not nbytes:
        return 0
    with LOCK:
        first = _free[0]
        _free[0] = first - (-nbytes // _ALIGNED) * _ALIGNED
    return first


@functools.lru_cache(maxsize=256)
def _maker(home: Home, device: Any) -> Any:
    dtype, shape = home
    with enable_x64(True), jax.default_device(device):
        return jax.jit(lambda: jnp.zeros(shape, JAX_DTYPE[dtype])).lower().compile()


def zeros(home: Home, device: Any) -> jax.Array:
    """Zeros of a dtype and shape on a device."""
    return _maker(home, device)()


def unpaged(home: Home, device: Any) -> jax.Array:
    """The same where the host stands in for the device, in fresh memory of the system's: it has no pages before it is
    written. Mapped, since the C library hands out what was freed before, cleared, and then it has pages."""
    dtype, shape = home
    nbytes = nbytes_of(home)
    room = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = np.frombuffer(room, np.uint8, nbytes).view(JAX_DTYPE[dtype])
    with enable_x64(True):
        return jax.device_put(flat.reshape(shape), device, may_alias=True)
