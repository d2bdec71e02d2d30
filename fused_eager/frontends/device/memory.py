"""A device's memory, as `torch.tpu` tells of it, under the names that `torch.cuda` has."""

from __future__ import annotations

import os
from typing import Any

from ...devices.accelerator import Accelerator
from ...devices.account import Account
from ...devices.buffer import LOCK
from ...devices.home import nbytes_of
from ...devices.host.free import free
from .doors import DOORS
from .queues import index_of


def _device(device: Any) -> Accelerator:
    return DOORS[index_of(device)].device


def _account(device: Any) -> Account:
    found = _device(device)
    if not found.account.is_kept:
        reset_peak_memory_stats(device)
    return found.account


def _of_the_platform(device: Any) -> dict[str, int]:
    """What JAX says of the device's memory; empty where the platform keeps no account."""
    found = _device(device).xla.memory_stats()
    return {} if found is None else {str(k): int(v) for k, v in found.items() if isinstance(v, int)}


def memory_allocated(device: Any = None) -> int:
    """The bytes of the tensors that live on a device, those that are pending among them."""
    table = _device(device).table
    with LOCK:
        return sum(nbytes_of(b.home) for b in table.values() if b.home is not None and b.is_alive())


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that tensors and a running region have taken at once.

    It is the platform's account, if it keeps one and `reset_peak_memory_stats` was not called. Else it begins where it
    is first asked for, or was reset.
    """
    kept = _device(device).account.is_kept
    peak = 0 if kept else _of_the_platform(device).get("peak_bytes_in_use", 0)
    return peak or max(_account(device).peak, memory_allocated(device))


def memory_reserved(device: Any = None) -> int:
    """The bytes that the platform has taken from the system."""
    return _of_the_platform(device).get("bytes_reserved", memory_allocated(device))


def max_memory_reserved(device: Any = None) -> int:
    """The same, as far as the platform keeps an account of it: what is taken stays taken."""
    return max(memory_reserved(device), max_memory_allocated(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count anew what is taken at most."""
    found = _device(device)
    with LOCK:
        found.account.begin(found.table)


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes and counts: those of `torch.cuda`'s that mean something here, by its names, and what JAX says of them."""
    now, most = memory_allocated(device), max_memory_allocated(device)
    return {
        **_of_the_platform(device),
        **{f"{kind}_bytes.all.current": now for kind in ("allocated", "active")},
        **{f"{kind}_bytes.all.peak": most for kind in ("allocated", "active")},
        "reserved_bytes.all.current": memory_reserved(device),
        "reserved_bytes.all.peak": max_memory_reserved(device),
        "num_alloc_retries": 0,
        "num_ooms": _device(device).account.exhausted,
    }


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """What a device's memory holds, for people."""
    free, total = mem_get_info(device)
    rows = {
        "of living tensors": memory_allocated(device),
        "most at once": max_memory_allocated(device),
        "taken by the platform": memory_reserved(device),
        "free": free,
        "in all": total,
    }
    lines = [f"{_device(device).name}, {_device(device).xla.device_kind}"]
    return "\n".join([*lines, *(f"  {name:<22} {n:>18,} B" for name, n in rows.items())])


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The bytes that are free, and all that there are; those of the host where the CPU stands in."""
    stats = _of_the_platform(device)
    total = stats.get("bytes_limit", 0)
    if total:
        return total - stats.get("bytes_in_use", 0), total
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free() or total, total), total


def empty_cache() -> None:
    """Nothing is kept of tensors that have died."""
