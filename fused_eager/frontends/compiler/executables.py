"""Executables: an exported program compiled for TPUs that are not here, as bytes that lie beside it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
from jax.experimental import serialize_executable

from ... import xla
from ...compiling.compile import tracing_for
from ...errors import ExportError
from ...targets.device import TargetDevice
from ...targets.target import Target, TargetError
from ...targets.topology import NoCompiler, obstacle


def target_of(text: str) -> Target:
    """The target that a text names.

    Raises:
        TargetError: it names none.
        NoCompiler: XLA's compiler for it is not installed.
    """
    found, why = Target.parse(text), obstacle()
    if why:
        raise NoCompiler(f"compiling for {found} needs XLA's compiler for TPUs: {why}")
    return found


def compiled(
    function: Callable[[list[Any], list[Any]], Any],
    weights: Sequence[jax.ShapeDtypeStruct],
    inputs: Sequence[jax.ShapeDtypeStruct],
    target: Target,
) -> tuple[bytes, dict[str, Any]]:
    """The executable of `function(weights, inputs)` on one device of a target, and what a process has to have that
    loads it.

    Raises:
        ExportError: XLA cannot compile it.
        TargetError: XLA's compiler knows no such topology.
    """
    device = TargetDevice(target)
    place = jax.sharding.SingleDeviceSharding(device.xla)

    def placed(forms: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in forms]

    try:
        with tracing_for(device):
            lowered = jax.jit(function, out_shardings=place).lower(placed(weights), placed(inputs))
            made = xla.compiled(lowered, target.platform)
        code = pickle.dumps(serialize_executable.serialize(made))
    except (ExportError, TargetError, NoCompiler):
        raise
    except Exception as error:
        raise ExportError(f"XLA does not compile it for {target}: {' '.join(str(error).split())[:400]}") from error
    return code, {"target": str(target), "kind": target.chip.kind, "jaxlib": version("jaxlib")}
