"""Borrowing: host memory as a JAX array that owns nothing and frees nothing.

torch's own DLPack capsule keeps a tensor whose end needs Python's lock, and the last reference to an input often goes
in one of XLA's threads: at best that thread then waits for the interpreter, at the end of the program it is killed
with it. So the capsule is written by hand, after the DLPack specification (dlpack.h, version 0), with a deleter that
does nothing; whoever borrows keeps the memory alive.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from jaxlib import xla_client

from fused_eager.fusion_rules.spec import TORCH_DTYPE

from .bounded import Bounded

Home = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a storage's dense value
MAX_DIMS = 64


def nbytes_of(home: Home) -> int:
    """The bytes of a value."""
    return math.prod(home[1]) * home[0].itemsize


def home_of(array: Any) -> Home:
    """The dtype and shape of a JAX array."""
    return TORCH_DTYPE[array.dtype], tuple(array.shape)


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor, its DLTensor spread out; the shape follows it in memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),  # code, bits and lanes
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_CPU = 1
_NAME = b"dltensor"
# A C function of one machine word that does nothing with it: JAX calls the deleter, and calling Python takes the lock.
_NOTHING = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value
# JAX copies all it needs at once but the deleter, which is always the same: one block serves every borrowing.
_block = ctypes.create_string_buffer(ctypes.sizeof(_ManagedTensor) + 8 * MAX_DIMS)
_address = ctypes.addressof(_block)
_head = _ManagedTensor.from_buffer(_block)
_bytes = memoryview(_block).cast("B")
_templates: Bounded[Home, bytes] = Bounded(4096)

_import = xla_client._xla.dlpack_managed_tensor_to_buffer
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _template(home: Home) -> bytes:
    dtype, shape = home
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a value has {len(shape)} dimensions; at most {MAX_DIMS} can be handed to JAX")
    sample = torch._C._to_dlpack(torch.empty(0, dtype=dtype))  # type: ignore[attr-defined]
    code = _ManagedTensor.from_address(_pointer_of(sample, _NAME)).dtype
    sizes = _address + ctypes.sizeof(_ManagedTensor)
    head = _ManagedTensor(None, _CPU, 0, len(shape), code, sizes, None, 0, None, _NOTHING)
    made = _templates[home] = bytes(head) + bytes((ctypes.c_int64 * len(shape))(*shape))
    return made


def borrow(address: int, home: Home, device: Any) -> Any:
    """The dense value `home` at `address` as a JAX array on `device`; a copy where XLA asks for more alignment.

    The caller keeps the memory alive and unchanged until whatever reads the array has finished, and holds the
    runtime's lock.
    """
    template = _templates.get(home)
    if template is None:
        template = _template(home)
    _bytes[: len(template)] = template
    _head.data = address or _address  # an empty value has no memory, and JAX wants some address
    try:
        capsule = _new_capsule(_address, _NAME, None)
    except ctypes.ArgumentError as error:
        if "RecursionError" in str(error):  # of the program, found out while ctypes looks at an argument
            raise RecursionError("maximum recursion depth exceeded") from error
        raise
    return _import(capsule, device, None)
