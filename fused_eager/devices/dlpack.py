"""DLPack: values from torch to JAX and back without copies, and memory described by hand (dlpack.h, version 0).

torch's own capsule keeps a tensor whose end needs Python's lock, and the last reference often goes in one of XLA's
threads: at best that thread then waits for the interpreter, at the end of the program it is killed with it. What is
written here has a deleter that does nothing; whoever makes a capsule keeps the memory, and this description of it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from fused_eager.fusion_rules.deferred import xla_client

if TYPE_CHECKING:
    import jax

MAX_DIMS = 64


class ManagedTensor(ctypes.Structure):
    """DLManagedTensor, its DLTensor spread out."""

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


CPU, ACCELERATOR = 1, 12  # kDLCPU, kDLExtDev
_NAME = b"dltensor"
# A C function of one machine word that does nothing with it: the deleter is called, and calling Python takes the lock.
NOTHING = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """The same, asked once."""
    return code_of(dtype)


def code_of(dtype: torch.dtype) -> int:
    """DLPack's code, bits and lanes of a dtype.

    Raises:
        RuntimeError, BufferError: DLPack has none.
    """
    sample = torch._C._to_dlpack(torch.empty(0, dtype=dtype, device="cpu"))  # type: ignore[attr-defined]
    return int(ManagedTensor.from_address(_pointer_of(sample, _NAME)).dtype)


_libc = ctypes.CDLL(None)
_malloc = _libc.malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_HEAD = struct.Struct("=QiiiIQQQQQ")  # a ManagedTensor, field by field


def owned(address: int, device: int, index: int, shape: tuple[int, ...], strides: tuple[int, ...], code: int) -> Any:
    """A capsule whose description lives as long as whatever takes it: the deleter is the C library's `free`.

    Args:
        address: where the memory begins; nobody looks there.
        device: DLPack's number of the kind of device, `index` which of them it is.
        code: the dtype, as `code_of` says.
    """
    n = len(shape)
    at = _malloc(_HEAD.size + 16 * n)
    if not at:
        raise MemoryError("no room for the description of a tensor")
    sizes = at + _HEAD.size
    head = _HEAD.pack(address, device, index, n, code, sizes, sizes + 8 * n, 0, 0, _FREE)
    text = head + array("q", (*shape, *strides)).tobytes()
    ctypes.memmove(at, text, len(text))
    return capsule(at)


def capsule(address: int) -> Any:
    """The capsule of the `ManagedTensor` at an address."""
    try:
        return _new_capsule(address, _NAME, None)
    except ctypes.ArgumentError as error:
        if "RecursionError" in str(error):  # of the program, found out while ctypes looks at an argument
            raise RecursionError("maximum recursion depth exceeded") from error
        raise


_capsule = torch._C._to_dlpack
_pointer_of_tensor = torch._C.TensorBase.data_ptr  # the unpatched one
_from_capsule = torch._C._from_dlpack


ALIGNED = 64  # bytes; XLA copies what is not, which takes longer, and jaxlib 0.6 warns each time


def to_array(t: torch.Tensor, device: Any) -> jax.Array:
    """The memory of a contiguous tensor as a JAX array: no copy where alignment allows, exact dtype always."""
    if _pointer_of_tensor(t) % ALIGNED:
        t = t.clone()  # jaxlib would, and leave it to JAX's own client, whatever the device
    return xla_client._xla.dlpack_managed_tensor_to_buffer(_capsule(t), device, None)


def to_tensor(array: jax.Array) -> torch.Tensor:
    """A JAX array as a tensor over the same memory. Waits until the array is computed."""
    return _from_capsule(xla_client._xla.buffer_to_dlpack_managed_tensor(array, stream=None))
