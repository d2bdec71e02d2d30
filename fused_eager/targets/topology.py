"""Topologies: the devices of a target as JAX knows them, from XLA's real compiler for them, on a host that has none.

For a TPU that compiler is the wheel `libtpu`, which is nobody's dependency: it is looked for once a target is named.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from fused_eager.fusion_rules.deferred import jax

from .. import xla
from ..errors import FusedEagerError
from .target import Target, TargetError

_lock = threading.Lock()


class NoCompiler(FusedEagerError):
    """XLA's compiler for a target is not installed; the text says how to get it."""


def obstacle() -> str:
    """Why nothing can be compiled for a TPU here; empty if it can. Loads nothing."""
    if xla.has_libtpu():
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

    xla.have_libtpu_load_quietly()
    try:
        found = topologies.get_topology_desc(platform=target.platform, topology_name=str(target), **shape)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise TargetError(f"XLA's compiler has no topology {target}: {str(error)[:200]}") from error
    return tuple(found.devices)


def bounds(devices: Any) -> dict[str, list[int]]:
    """The shape of a set of devices, from their coordinates; none for devices that have no coordinates."""
    coords = [tuple(d.coords) for d in devices if getattr(d, "coords", None) is not None]
    if not coords:
        return {}
    cores = 1 + max(int(getattr(d, "core_on_chip", 0)) for d in devices)
    return {"chips": [1 + max(axis) for axis in zip(*coords, strict=True)], "cores": [cores]}
