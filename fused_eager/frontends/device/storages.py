"""Storages of a device: made without values, resized, and made by Python's own constructor."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fused_eager.fusion_rules.geometry import home_shape, is_dense
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec, contiguous_strides

from ...devices.accelerator import Accelerator, AcceleratorBuffer
from ...devices.arrivals import await_storage
from ...devices.buffer import LOCK
from ...devices.device import SEEN_AS
from ...devices.storage import offset_of, storage_of, swap_memory
from ...log import site
from ...log.reasons import Reason
from .doors import DOORS, existing, named_door

Tensor = torch.Tensor


def empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """A tensor that nobody has written: see `_unwritten`."""
    return _unwritten(_strided(size, stride, dtype, device))


def _strided(size: Any, stride: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    size, stride = tuple(size), tuple(stride)
    of = named_door(device).device
    if len(size) != len(stride):
        n, m = len(size), len(stride)
        raise RuntimeError(f"dimensionality of sizes ({n}) must match dimensionality of strides ({m})")
    if any(n < 0 for n in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    spec = Spec(size, dtype, stride, SEEN_AS)
    with LOCK:
        t, b = of.new(spec, 0)
        if dtype not in JAX_DTYPE:  # XLA has the bytes alone
            b.home = torch.uint8, (b.storage.nbytes(),)
        else:
            b.home = dtype, home_shape(spec) if is_dense(size, stride) else (b.storage.nbytes() // dtype.itemsize,)
        b.table[b.cdata] = b
    return t


def _unwritten(t: Tensor) -> Tensor:
    """What nobody has written holds zeros, which are made once somebody reads them. Where algorithms are to be
    deterministic torch fills it with what does not go unseen: NaN, or the largest whole number."""
    if torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory():
        if t.dtype.is_floating_point or t.dtype.is_complex:
            t.fill_(float("nan"))
        elif t.dtype in _NUMBERS:
            t.fill_(True if t.dtype is torch.bool else torch.iinfo(t.dtype).max)
    return t


_NUMBERS = frozenset(d for d in JAX_DTYPE if not (d.is_floating_point or d.is_complex))


def empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """The same, laid out as `memory_format` says."""
    size = tuple(size)
    stride = contiguous_strides(size)
    if memory_format not in (None, torch.contiguous_format):
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return empty_strided(size, stride, dtype=dtype, device=device)


def resize(t: Tensor, size: tuple[int, ...], memory_format: torch.memory_format | None) -> Tensor:
    """`resize_`: in a storage that is large enough, or has been given more addresses."""
    like = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    stride = like.stride()
    needed = 0
    if 0 not in size:
        needed = (1 + offset_of(t) + sum((n - 1) * s for n, s in zip(size, stride, strict=True))) * t.itemsize
    storage = storage_of(t)
    before = storage.nbytes() // t.itemsize
    grows = needed > storage.nbytes()
    if grows:
        give(storage, needed)
    if tuple(t.shape) != size or memory_format is not None:
        torch.ops.aten.as_strided_.default(t, size, stride, offset_of(t))
    if grows:
        _unwritten(t.as_strided((storage.nbytes() // t.itemsize - before,), (1,), before))
    return t


def give(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give a storage of a device so many bytes: what it holds stays as far as there is room, and zeros follow."""
    found = DOORS[storage.device.index or 0]
    device = found.device
    await_storage(storage)
    with LOCK:
        b = device.buffer(storage)
        assert isinstance(b, AcceleratorBuffer)
        dtype = b.home[0] if b.home is not None and nbytes % b.home[0].itemsize == 0 else torch.uint8
        if not (nbytes and storage.nbytes()):
            # Nothing stays, so nobody has to wait for what it holds: FSDP2 frees and refills storages at each layer.
            _move(storage, nbytes, device)
            found.forget(b, (dtype, (nbytes // dtype.itemsize,)))
            return
        held = device.fetch(found.array_of(b, Reason("sync.memory", "resize_"))).reshape(-1).view(torch.uint8)
        try:
            home = torch.zeros(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            device.fail(error, f"a storage that grows at {site.describe(site.here())}")
        kept = min(nbytes, held.numel())
        home[:kept] = held[:kept]
        _move(storage, nbytes, device)
        found.replace(b, home.view(dtype))


def _move(storage: torch.UntypedStorage, nbytes: int, device: Accelerator) -> None:
    """Give a storage other addresses, for so many bytes."""
    for other in ((0,), (nbytes,)):  # two of different sizes are not exchanged, unless one has none
        swap_memory(storage, storage_of(device.empty(other, (1,), torch.uint8)))


def seen_as(t: Tensor) -> None:
    """What was brought as mere bytes (by pickle, from a checkpoint) takes the dtype and shape of a tensor that is laid
    over all of it. Else what reads it would be compiled for bytes, and again for what its updates are."""
    storage = storage_of(t)
    spec = Spec(tuple(t.shape), t.dtype, t.stride(), SEEN_AS)
    if t.dtype is torch.uint8 or t.dtype not in JAX_DTYPE or not is_dense(spec.shape, spec.strides):
        return
    found = DOORS[t.get_device()]
    await_storage(storage)
    with LOCK:
        b = found.device.table.get(storage._cdata)
        if b is None or b.stream is not None or b.error is not None or b.home is None or b.home[0] is not torch.uint8:
            return
        if offset_of(t) or t.numel() * t.itemsize != storage.nbytes() or not storage.nbytes():
            return
        if b.array is None:
            b.home = t.dtype, home_shape(spec)
        else:
            held = found.device.fetch(b.array).reshape(-1).clone()
            found.replace(b, held.view(t.dtype).reshape(home_shape(spec)))  # type: ignore[arg-type]


def untyped(nbytes: int, index: int) -> torch.UntypedStorage:
    """A storage of so many bytes."""
    return storage_of(_strided((nbytes,), (1,), torch.uint8, torch.device(DOORS[existing(index)].device.name)))


def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """`resize_` of a storage: see `give`."""
    give(storage, size)
    return storage


def new(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """An empty storage of the same device."""
    return untyped(0, storage.device.index or 0)


def byteswap(storage: torch.UntypedStorage, size: int) -> None:
    """Reverse the bytes of each element of so many bytes: on the host, and put back."""
    host = storage.cpu()
    host._byteswap(size)
    storage.copy_(host)


def stays_here(self: torch.UntypedStorage, *args: Any) -> NoReturn:
    """A device's memory belongs to one process, and torch asks for it to be shared with another.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"a tensor on {self.device} cannot be sent to another process, which could not see its memory: send t.cpu(), "
        "and bring that to a device there"
    )
