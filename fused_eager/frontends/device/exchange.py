"""DLPack for tensors of the device: other libraries get a copy of the value, torch itself the same storage.

The device's arrays never change, and whoever takes memory by DLPack may write to it; so what is handed out is a copy
that is nobody else's, in the memory where JAX computes: the host's where the CPU stands in, else the GPU's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack
from torch.overrides import has_torch_function_unary

from ...devices.dlpack import CPU
from ...devices.storage import offset_of, pointer_of, storage_of
from ...log.reasons import Reason
from .doors import DOORS, is_on_device
from .transfers import copied

_HANDED_OUT = Reason("sync.memory", "__dlpack__")
_ON_HOST = CPU, 0


def _place(t: torch.Tensor) -> tuple[int, int]:
    """DLPack's name for the memory that a tensor's value is in.

    Raises:
        BufferError: it has none.
    """
    xla = DOORS[t.get_device()].device.xla
    if xla.platform == "cpu":
        return _ON_HOST
    if xla.platform not in _KINDS:
        raise BufferError(f"DLPack has no name for the memory of {t.device}, a {xla.device_kind}: hand out t.cpu()")
    return _KINDS[xla.platform], int(xla.local_hardware_id)


_KINDS = {"cuda": 2, "gpu": 2, "rocm": 10}  # kDLCUDA, kDLROCM


def _capsule(
    t: torch.Tensor,
    *,
    stream: Any = -1,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """`Tensor.__dlpack__` of a tensor of the device.

    Raises:
        BufferError: it has a gradient to come, is conjugated or not dense, or no copy or another device is asked for.
    """
    _refuse(t)
    if copy is False:
        raise BufferError(f"a tensor on {t.device} is handed out as a copy: its memory is written by nobody else")
    wanted = _place(t) if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
    if wanted == _ON_HOST:
        return t.detach().cpu().__dlpack__(max_version=max_version)
    if wanted != _place(t):
        raise BufferError(f"a tensor on {t.device} is handed out on it or on the host, not on {wanted}")
    return array_of(t).__dlpack__(**({} if stream == -1 else {"stream": stream}), max_version=max_version)


def _refuse(t: torch.Tensor) -> None:
    """Raise torch's errors for what a capsule cannot say of a tensor."""
    if t.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if t.is_conj():
        raise BufferError("Can't export tensors with the conjugate bit set")
    if t.layout != torch.strided:
        raise BufferError("Can't export tensors with layout other than torch.strided")


def array_of(t: torch.Tensor) -> Any:
    """A copy of a tensor's value as a JAX array of its shape, which no region overwrites."""
    return copied(t, _HANDED_OUT)[1]


def _from_dlpack(torchs: Any) -> Any:
    """`torch.from_dlpack`, which lays a second tensor over the storage of one that is on the device."""

    @functools.wraps(torchs)
    def from_dlpack(ext_tensor: Any, *, device: Any = None, copy: bool | None = None) -> torch.Tensor:
        if not isinstance(ext_tensor, torch.Tensor) or not is_on_device(ext_tensor):
            made = torchs(ext_tensor, device=device, copy=copy)
            return _rebased(made) if is_on_device(made) else made  # type: ignore[no-any-return]
        to = ext_tensor.device if device is None else torch.device(device)
        if copy is False and to != ext_tensor.device:
            raise ValueError(f"cannot move a tensor from {ext_tensor.device} to {to} without copying")
        _refuse(ext_tensor)
        return _over(storage_of(ext_tensor), offset_of(ext_tensor), ext_tensor).to(to, copy=bool(copy))

    return from_dlpack


def _to_dlpack(torchs: Any) -> Any:
    """`torch.to_dlpack`. Torch reads the capsule of a tensor of the device; to anybody else it is of a device that they
    do not know."""

    @functools.wraps(torchs)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.Tensor) and is_on_device(tensor):
            DOORS[tensor.get_device()].buffer_of(tensor)  # else whoever reads the capsule finds none at its address
        return torchs(tensor)

    return to_dlpack


def _rebased(t: torch.Tensor) -> torch.Tensor:
    """A tensor that torch has made of a capsule of the device's, over the storage that has its addresses: torch lays a
    storage of its own over them, which begins where the tensor does."""
    address = pointer_of(storage_of(t))
    for b in DOORS[t.get_device()].device.table.values():
        offset = address - pointer_of(b.storage)
        if 0 < offset < b.storage.nbytes():
            return _over(b.storage, offset // t.element_size(), t)
    return t


def _over(storage: torch.UntypedStorage, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of a dtype, shape and strides over a storage."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.shape, like.stride())


def register() -> None:
    """Have torch's functions for DLPack know the device."""
    for name, ours in (("__dlpack__", _capsule), ("__dlpack_device__", _place)):
        setattr(torch.Tensor, name, _serving(getattr(torch.Tensor, name), ours))
    torch.from_dlpack = torch.utils.dlpack.from_dlpack = _from_dlpack(torch.from_dlpack)  # type: ignore[assignment]
    torch.to_dlpack = torch.utils.dlpack.to_dlpack = _to_dlpack(torch.to_dlpack)  # type: ignore[assignment]


def _serving(torchs: Any, ours: Any) -> Any:
    """A method of tensors that is ours for those on the device, and torch's for all others."""

    @functools.wraps(torchs)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A subclass with a function of its own for torch's is asked by torch's.
        is_ours = not has_torch_function_unary(self) and is_on_device(self)
        return (ours if is_ours else torchs)(self, *args, **kwargs)

    return method


__all__ = ["array_of", "register"]
