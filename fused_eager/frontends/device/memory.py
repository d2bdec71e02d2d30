"""A device's memory, as `torch.tpu` tells of it, under the names that `torch.cuda` has."""

from __future__ import annotations

import os
from typing import Any

from ...devices.accelerator import Accelerator
from ...devices.buffer import LOCK, living
from ...devices.home import nbytes_of
from ...devices.host.free import free
from .doors import DOORS
from .queues import index_of


def _device(device: Any) -> Accelerator:
    return DOORS[index_of(device)].device


def _of_the_platform(device: Any) -> dict[str, int]:
    """What JAX says of the device's memory; empty where the platform keeps no account."""
    found = _device(device).xla.memory_stats()
    return {} if found is None else {str(k): int(v) for k, v in found.items() if isinstance(v, int)}


def memory_allocated(device: Any = None) -> int:
    """The bytes of the tensors that live on a device, those that are pending among them."""
    table = _device(device).table
    with LOCK:
        return sum(map(nbytes_of, living(table, pending=True)))


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that tensors and a running region have taken at once.

    It is the platform's account, if it keeps one and `reset_peak_memory_stats` was not called. Else it begins where it
    is first asked for, or was reset.
    """
    return _taken(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    """The bytes that the platform has taken from the system."""
    return _taken(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Any = None) -> int:
    """The same, as far as the platform keeps an account of it: what is taken stays taken."""
    return _taken(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count anew what is taken at most."""
    found = _device(device)
    with LOCK:
        found.account.begin(found.table)


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes and counts: those of `torch.cuda`'s that mean something here, by its names, and what JAX says of them."""
    return {**_taken(device), "num_alloc_retries": 0, "num_ooms": _device(device).account.exhausted}


def _taken(device: Any) -> dict[str, int]:
    """All bytes that are told, from one look at the platform and one at the living tensors."""
    stats, account, now = _of_the_platform(device), _device(device).account, memory_allocated(device)
    most = 0 if account.is_kept else stats.get("peak_bytes_in_use", 0)
    if not most:
        if not account.is_kept:
            reset_peak_memory_stats(device)
        most = max(account.peak, now)
    reserved = max(stats.get("pool_bytes", 0), stats.get("bytes_reserved", 0), now)
    return {
        **stats,
        **{f"{kind}_bytes.all.current": now for kind in ("allocated", "active")},
        **{f"{kind}_bytes.all.peak": most for kind in ("allocated", "active")},
        "reserved_bytes.all.current": reserved,
        "reserved_bytes.all.peak": max(reserved, most, stats.get("peak_pool_bytes", 0)),
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
