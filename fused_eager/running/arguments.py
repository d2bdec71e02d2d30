"""Arguments: what a compiled region is called with, without copies where the memory allows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from ..memory import buffers
from ..memory.borrow import borrow, borrow_again
from ..memory.trap import pointer_of
from ..planning.plan import Region
from ..tracing.stream import NativeInput, Node
from ..xla import device, enable_x64


def as_array(value: Any) -> jax.Array:
    """A value of an execution as a JAX array; islands leave torch tensors."""
    return buffers.to_array(value, device()) if isinstance(value, torch.Tensor) else value


def import_native(item: NativeInput, anew: bool = True) -> jax.Array:
    """The array over a native input's memory, which the caller keeps alive. One of its own where it may be donated, for
    that ends it for whoever has it."""
    address = pointer_of(item.storage) + item.offset
    return borrow(address, item.home, device()) if anew else borrow_again(address, item.home, device())


def numbers(nodes: Sequence[Node], region: Region, memory: list[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """The hoisted numbers of a region: its last two arguments. What is put into `memory` has to outlive the run."""
    floats, ints = hoisted(nodes, region)
    return _vector(floats, torch.float64, memory), _vector(ints, torch.int64, memory)


def hoisted(nodes: Sequence[Node], region: Region) -> tuple[list[float], list[int]]:
    """The hoisted numbers of a region, of both kinds in order."""
    scalars = [s for i in region.nodes for s in nodes[i].scalars]
    return [s for s in scalars if type(s) is float], [s for s in scalars if type(s) is int]


def _vector(numbers: list[Any], dtype: torch.dtype, memory: list[np.ndarray]) -> jax.Array:
    if not numbers:
        return _no_numbers(dtype)
    room = np.empty(len(numbers) + _ALIGNED // 8 - 1, _NUMPY[dtype])
    address = room.ctypes.data
    skipped = -address % _ALIGNED // 8
    room[skipped : skipped + len(numbers)] = numbers
    memory.append(room)
    return borrow(address + 8 * skipped, (dtype, (len(numbers),)), device())


@functools.cache
def _no_numbers(dtype: torch.dtype) -> jax.Array:
    with enable_x64(True):
        return jax.device_put(np.zeros(0, _NUMPY[dtype]), device())


_ALIGNED = 64  # bytes; XLA copies what is not, which takes longer, and jaxlib 0.6 warns each time
_NUMPY = {torch.float64: np.float64, torch.int64: np.int64}
