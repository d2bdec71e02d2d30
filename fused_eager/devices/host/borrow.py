"""Borrowing: host memory as a JAX array that owns nothing and frees nothing; whoever borrows keeps the memory alive."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch

from fused_eager.fusion_rules.deferred import xla_client

from ...bounded import Bounded
from ..dlpack import ALIGNED, CPU, MAX_DIMS, NOTHING, ManagedTensor, capsule, code_of, to_array
from ..home import Home
from ..storage import tensor_at

_HOST = torch.device("cpu")
# JAX copies all it needs at once but the deleter, which is always the same: one block serves every borrowing.
_block = ctypes.create_string_buffer(ctypes.sizeof(ManagedTensor) + 8 * MAX_DIMS)
_address = ctypes.addressof(_block)
_head = ManagedTensor.from_buffer(_block)
_bytes = memoryview(_block).cast("B")
_templates: Bounded[Home, bytes] = Bounded(4096)


def _template(home: Home) -> bytes:
    dtype, shape = home
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a value has {len(shape)} dimensions; at most {MAX_DIMS} can be handed to JAX")
    sizes = _address + ctypes.sizeof(ManagedTensor)  # which follow it in memory
    head = ManagedTensor(None, CPU, 0, len(shape), code_of(dtype), sizes, None, 0, None, NOTHING)
    # Not an array of ctypes: that makes a type for each length, which is garbage that waits for the collector.
    made = _templates[home] = bytes(head) + array("q", shape).tobytes()
    return made


def borrow(address: int, home: Home, device: Any) -> Any:
    """The dense value `home` at `address` as a JAX array on `device`; a copy where XLA asks for more alignment.

    The caller keeps the memory alive and unchanged until whatever reads the array has finished, and holds the
    runtime's lock.
    """
    template = _templates.get(home)
    if template is None:
        template = _template(home)
    if address % ALIGNED:
        return to_array(tensor_at(address, home, _HOST), device)
    _bytes[: len(template)] = template
    _head.data = address or _address  # an empty value has no memory, and JAX wants some address
    return xla_client._xla.dlpack_managed_tensor_to_buffer(capsule(_address), device, None)


# Arrays over memory that has been borrowed: a model whose weights nobody writes takes the same every time.
_KNOWN: Bounded[tuple[Any, int, Home], Any] = Bounded(4096)


def borrow_again(address: int, home: Home, device: Any) -> Any:
    """`borrow`, with the same array for the same memory each time: a twentieth of the time (0.15 us). Nobody may donate
    it.

    An array says where and how large a value is, nothing else, so it is right for whoever has that memory next.
    """
    where = device, address, home
    found = _KNOWN.get(where)
    if found is None or found.is_deleted():
        found = borrow(address, home, device)
        if address and found.unsafe_buffer_pointer() == address:  # else it is a copy
            _KNOWN[where] = found
    return found
