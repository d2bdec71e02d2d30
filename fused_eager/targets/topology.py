"""Topologies: the devices of a target as JAX knows them, from XLA's real compiler for them, on a host that has none.

For a TPU that compiler is the wheel `libtpu`, which is nobody's dependency: it is looked for once a target is named.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from typing import Any

from fused_eager.fusion_rules.deferred import jax

from ..errors import FusedEagerError
from .target import Target, TargetError

# Without these libtpu asks a metadata server of Google's which machine this is, complains on stderr about the answer,
# writes log files and takes a lock that keeps a second process out.
_ALONE = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}
_lock = threading.Lock()


class NoCompiler(FusedEagerError):
    """XLA's compiler for a target is not installed; the text says how to get it."""


def obstacle() -> str:
    """Why nothing can be compiled for a TPU here; empty if it can. Loads nothing."""
    if os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")) or importlib.util.find_spec("libtpu") is not None:
        return ""
    return "libtpu is not installed (pip install 'fused-eager[tpu]'; Linux on x86-64)"


def devices(target: Target) -> tuple[Any, ...]:
    """The devices of a target, for which JAX can compile and on which nothing can run.

    Raises:
        NoCompiler: XLA's compiler for it is not installed.
        TargetError: that compiler knows no such topology.
    """
    with _lock:
        return _devices(target)


@functools.cache
def _devices(target: Target) -> tuple[Any, ...]:
    why = obstacle()
    if why:
        raise NoCompiler(f"compiling for {target} needs XLA's compiler for TPUs: {why}")
    shape = {"chips_per_host_bounds": (1, 1, 1)} if max(target.shape) == 1 else {}
    from jax.experimental import topologies

    _be_quiet()
    try:
        found = topologies.get_topology_desc(platform=target.platform, topology_name=str(target), **shape)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise TargetError(f"XLA's compiler has no topology {target}: {str(error)[:200]}") from error
    return tuple(found.devices)


def _be_quiet() -> None:
    """Have libtpu load quietly on a host without a TPU, which JAX has found out as it was imported. It reads some of
    the variables late, so they stay."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)


def bounds(devices: Any) -> dict[str, list[int]]:
    """The shape of a set of devices, from their coordinates; none for devices that have no coordinates."""
    coords = [tuple(d.coords) for d in devices if getattr(d, "coords", None) is not None]
    if not coords:
        return {}
    cores = 1 + max(int(getattr(d, "core_on_chip", 0)) for d in devices)
    return {"chips": [1 + max(axis) for axis in zip(*coords, strict=True)], "cores": [cores]}
