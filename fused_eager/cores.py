"""Cores: how many of the machine's this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those that its affinity allows, where the system has one; else all."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
