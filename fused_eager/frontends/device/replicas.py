"""Copies among several devices of one process: what `torch.nn.parallel`'s `scatter`, `gather` and `DataParallel` call.

torch has these functions in C++, for CUDA alone, and a build for the CPU lacks them. Here they are copies by
`Tensor.to` and one concatenation, which are recorded as any op is. Shapes, errors and what shares memory are as with
CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused_eager.fusion_rules.lowering import leaves

from .doors import CURRENT, is_on_device

Tensor = torch.Tensor
_HOST = -1  # the number by which `gather` is told of the CPU


def _device(index: int) -> torch.device:
    name = torch._C._get_privateuse1_backend_name()
    return torch.device("cpu") if index == _HOST else torch.device(name, index)


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor.to(_device(index)) for index in devices]


def _broadcast_out(tensor: Tensor, out: Sequence[Tensor]) -> list[Tensor]:
    for i, to in enumerate(out):
        _on_device(to, "out_tensors", i)
        _same_shape(to, tensor.shape, i)
        to.copy_(tensor, non_blocking=True)
    return list(out)


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], size: int) -> list[list[Tensor]]:
    """For each device a copy of each tensor. `size`, of CUDA's buffers, means nothing: a region copies them all."""
    for i, t in enumerate(tensors):
        if not is_on_device(t) or t.get_device() != devices[0]:
            raise RuntimeError(f"all tensors must be on devices[0]: {devices[0]}, but tensor {i} is on {t.device}")
    return [[t if index == devices[0] else t.to(_device(index)) for t in tensors] for index in devices]


def _scatter(
    tensor: Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None, dim: int, streams: Any = None
) -> list[Tensor]:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        if len(chunk_sizes) != len(devices):
            raise RuntimeError(
                f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(devices)} and "
                f"len(chunk_sizes) = {len(chunk_sizes)}"
            )
        chunks = tensor.split(list(chunk_sizes), dim)
    return [chunk.to(_device(index), non_blocking=True) for chunk, index in zip(chunks, devices, strict=False)]


def _scatter_out(tensor: Tensor, out: Sequence[Tensor], dim: int, streams: Any = None) -> list[Tensor]:
    if not out:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    for i, to in enumerate(out):
        _on_device(to, "out_tensors", i)
        rest = [*tensor.shape]
        rest[dim] = to.shape[dim]
        _same_shape(to, rest, i)
    for chunk, to in zip(tensor.split([to.shape[dim] for to in out], dim), out, strict=True):
        to.copy_(chunk, non_blocking=True)
    return list(out)


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    _gathered(tensors, dim)
    to = _device(CURRENT[0] if destination is None else destination)
    return torch.cat([t.to(to) for t in tensors], dim)


def _gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    size = _gathered(tensors, dim)
    if list(out.shape) != size:
        raise RuntimeError(f"Expected out tensor to have shape {size}, but got {list(out.shape)}")
    return out.copy_(torch.cat([t.to(out.device) for t in tensors], dim))


def _gathered(tensors: Sequence[Tensor], dim: int) -> list[int]:
    """The shape of what is gathered.

    Raises:
        RuntimeError: there is nothing to gather, a tensor is not on the device, or their shapes do not fit.
    """
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    size = list(tensors[0].shape)
    for i, t in enumerate(tensors):
        _on_device(t, "tensors", i)
        if size and t.dim() == len(size):
            size[dim] = t.shape[dim]
        _same_shape(t, size, i)
    if size:
        size[dim] = sum(t.shape[dim] for t in tensors)
    return size


def _on_device(t: Tensor, what: str, at: int) -> None:
    if not is_on_device(t):
        name = torch._C._get_privateuse1_backend_name()
        raise RuntimeError(f"Expected all {what} to be on the device {name}, but {what}[{at}] is on {t.device}")


def _same_shape(t: Tensor, shape: Sequence[int], at: int) -> None:
    if list(t.shape) != list(shape):
        raise RuntimeError(f"Expected tensor {at} to have shape {list(shape)}, but got {list(t.shape)}")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_broadcast": _broadcast,
    "_broadcast_out": _broadcast_out,
    "_broadcast_coalesced": _broadcast_coalesced,
    "_scatter": _scatter,
    "_scatter_out": _scatter_out,
    "_gather": _gather,
    "_gather_out": _gather_out,
}


def register() -> None:
    """Serve what `torch.nn.parallel.comm` calls. A build for CUDA has functions of its own, which go on to serve calls
    with no tensor of the device."""
    for name, ours in _FUNCTIONS.items():
        torchs = getattr(torch._C, name, None)
        setattr(torch._C, name, ours if torchs is None else _serving(torchs, ours))


def _serving(torchs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        is_ours = any(isinstance(t, Tensor) and is_on_device(t) for t in leaves(args))
        return (ours if is_ours else torchs)(*args)

    return call


__all__ = ["register"]
