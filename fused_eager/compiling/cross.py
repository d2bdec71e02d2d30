"""Cross-compiling: a region for a target, on a host that has none, and what XLA's compiler says of it.

What comes out is the entry that a host with such a device looks for: the same function is lowered, the key is made by
the same code from the same values, and the bytes are XLA's own serialisation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from fused_eager.cache import Key, explain

from .. import xla
from ..lowering.failed import NodeFailed
from ..targets.device import TargetDevice
from ..targets.target import Target
from .canonical import to_computation
from .compile import lower, tracing_for
from .cycles import cycles
from .executable import Executable, Failure, Portable, as_portable, failure_blobs, needs, to_blobs
from .key import Computation
from .remake import as_asked, key_here


@dataclass(frozen=True, slots=True)
class Cost:
    """What XLA's compiler expects of one run of an executable.

    `seconds` is its analysis of operations and bytes, without the `unjudged` instructions for which it has none;
    `cycles` what it expects of the kernels that it has made, without the `uncounted_kernels`. The bytes in memory are
    of arguments, of results that take no argument's place, of temporaries, and of code.
    """

    seconds: float
    unjudged: int
    flops: float
    bytes: float
    arguments: int
    outputs: int
    temporaries: int
    code: int
    cycles: float = 0.0
    uncounted_kernels: int = 0

    @property
    def memory(self) -> int:
        """Bytes of the device's memory that are taken while it runs."""
        return self.arguments + self.outputs + self.temporaries + self.code


@dataclass(frozen=True, slots=True)
class Crossed:
    """A region compiled for a target: the blobs of its entry, the seconds that took, those in JAX, and its cost."""

    blobs: dict[str, bytes]
    seconds: float
    tracing: float
    cost: Cost


def cross_compile(computation: Computation, bounds: bool, device: TargetDevice) -> Crossed:
    """Compile a region for a target.

    Raises:
        NodeFailed: one of its nodes has no lowering.
        JaxRuntimeError: XLA cannot compile it.
        NotPortable: it calls into this process.
        NoCompiler: XLA's compiler for the target is not installed.
    """
    began = time.perf_counter()
    made = lower(computation, bounds, device)
    tracing = time.perf_counter() - began
    with tracing_for(device):
        compiled = xla.compiled(made.lowered, device.target.platform)
    seconds = time.perf_counter() - began
    fresh = compiled.runtime_executable()
    portable: Portable = as_portable(made.lowered, fresh, device.target.platform)
    executable = Executable(_nowhere, made.checks, seconds, computation.name, needs=needs(fresh))
    return Crossed(to_blobs(portable, executable), seconds, tracing, cost_of(compiled))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A region that has no executable on a target, and why. `blobs` are those of the entry that says so, where no
    process ever could make one."""

    reason: str
    blobs: dict[str, bytes] | None = None


def cross_compile_key(key: Key, target: Target) -> Crossed | Refusal:
    """Compile the region in a key for a target, as the program that the key came from would have had it."""
    device = TargetDevice(target)
    try:
        with as_asked(key):
            here = key_here(key, device=device)
            if here != key:
                return Refusal(f"it would be another region here: {'; '.join(explain(key, here, 3))}")
            computation = to_computation(key.parts["region"])
            return cross_compile(computation, key.parts["check_bounds"], device)
    except NodeFailed as failed:
        failure = Failure(failed.index, failed.reason)
        return Refusal(failed.reason, failure_blobs(failure) if failed.lasting else None)
    except Exception as error:  # one of many, and the others are worth going on
        return Refusal(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _nowhere(*arrays: Any) -> Any:
    raise AssertionError("compiled for a target: it cannot run here")


def cost_of(compiled: Any) -> Cost:
    """What XLA says of JAX's `Compiled`."""
    told = compiled.cost_analysis() or {}
    seconds, unjudged = judged(told.get("optimal_seconds", math.nan))
    memory, counted = compiled.memory_analysis(), cycles(compiled.as_text() or "")
    return Cost(
        seconds,
        unjudged,
        max(float(told.get("flops", 0.0)), 0.0),
        max(float(told.get("bytes accessed", 0.0)), 0.0),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        counted.counted,
        counted.uncounted,
    )


def judged(optimal: float) -> tuple[float, int]:
    """XLA's `optimal_seconds` taken apart: each instruction that it has no estimate for counts as -1 s.

    Regions take less than a second, so the rest is what is above the next whole number.
    """
    whole = math.floor(optimal) if not np.isnan(optimal) else 0
    return (0.0, 0) if np.isnan(optimal) else (optimal - whole, -whole)
