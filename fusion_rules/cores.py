"""Cores: how many of the machine's this process may use, and how many threads XLA has on them."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those that its affinity allows, where the system has one; else all."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def threads() -> int:
    """How many threads XLA:CPU has, as it counts them when it starts."""
    named = os.environ.get("NPROC", "")
    return int(named) if named.isdecimal() and int(named) else usable_cores()
