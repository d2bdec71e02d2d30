"""Out of memory: whatever says so, as torch's own error, with what holds the memory of the device."""

from __future__ import annotations

import heapq
import re

import torch

from .buffer import LOCK, Table, living
from .home import nbytes_of

# How JAX's platforms, ATen's allocator and Python say it.
_SAYS = ("RESOURCE_EXHAUSTED", "can't allocate memory", "not enough memory", "out of memory")
_ASKED = re.compile(r"allocat(?:e|ing) ([\d.]+) ?(|bytes|[KMGT]?i?B)(?!\w)")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
LARGEST = 5  # tensors that are told of


def is_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAYS)


def out_of_memory(error: BaseException, name: str, table: Table, where: str) -> torch.OutOfMemoryError:
    """The same as torch's error.

    Args:
        error: what was raised.
        name: of the device.
        table: the buffers of its storages.
        where: the op or the ops that asked for memory, with their line; "" where nobody knows.
    """
    found = _ASKED.search(str(error))
    with LOCK:
        held = living(table)
    most = heapq.nlargest(LARGEST, held, key=nbytes_of)
    largest = ", ".join(f"{str(d).removeprefix('torch.')} {list(s)} ({_bytes(nbytes_of((d, s)))})" for d, s in most)
    text = f"{name} out of memory."
    if found is not None:
        unit = found[2] if found[2] in _UNITS else "B"
        text += f" Tried to allocate {_bytes(float(found[1]) * 1024 ** _UNITS.index(unit))}."
    if where:
        text += f" It was for {where}."
    plural = "s hold" if len(held) != 1 else " holds"
    text += f" {len(held)} tensor{plural} {_bytes(sum(map(nbytes_of, held)))}"
    made = torch.OutOfMemoryError(f"{text}; the largest are: {largest}." if largest else f"{text}.")
    made.__cause__ = error
    return made


def _bytes(n: float) -> str:
    for unit in _UNITS[:-1]:
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} {_UNITS[-1]}"
