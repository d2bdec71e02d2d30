"""What has to be settled before torch and XLA are loaded: threads, cores and malloc; and how the header says it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

_READY = "BENCHMARKS_ENVIRONMENT_READY"
# glibc hands memory above these limits back to the kernel at every free, and eager then pays page faults at every op.
_RAISED = {name: str(1 << 32) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
_RAISED["MALLOC_TOP_PAD_"] = str(1 << 28)
MALLOC = ("default", "raised")


def wanted(threads: int, malloc: str) -> dict[str, str]:
    """The environment variables of a measurement with so many threads."""
    threading = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**threading, **(_RAISED if malloc == "raised" else {})}


def restart(argv: Sequence[str], threads: int, malloc: str) -> None:
    """Become `python -m benchmarks` again in the wanted environment, pinned to `threads` cores; return if this is it.

    A new process because malloc reads its settings before Python starts, and pinned because the sizes of all thread
    pools (torch's, XLA's) follow from the cores that the process may use.
    """
    if os.environ.get(_READY):
        return
    environment = {name: value for name, value in os.environ.items() if name not in _RAISED}
    environment.update(wanted(threads, malloc), **{_READY: malloc})
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < threads:
            raise SystemExit(f"{threads} threads were asked for and this process may use {len(cores)} cores")
        os.sched_setaffinity(0, cores[-threads:])
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *argv], environment)


def describe() -> dict[str, str]:
    """The settings and versions of this process, for the header and the JSON."""

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    cores = ",".join(map(str, sorted(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else "all"
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", *_RAISED, "XLA_FLAGS")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "jax", "jaxlib", "fused-eager")},
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "pinned to cores": cores,
        **{name: os.environ.get(name, "unset") for name in names},
    }


def build_follower() -> str:
    """Build the compiled follower before anything is timed, where that can be: "compiled", or why it is not."""
    from fused_eager.follower import build

    if not build.obstacle():
        build.build(patiently=False)
    return build.obstacle() or "compiled"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
