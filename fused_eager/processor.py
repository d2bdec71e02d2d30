"""The processor: what it is, for keys, and what XLA is told about it beside what XLA finds out."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fused_eager.cache import Unencodable


@functools.cache
def cpu() -> Mapping[str, Any]:
    """This machine's processor, as XLA tunes for it: architecture, model, instruction sets.

    Raises:
        Unencodable: the system does not tell.
    """
    rows: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        raise Unencodable("cpu", f"the processor's features are unknown here: {error}") from error
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        rows[name.strip()] = value.strip()
    features = rows.get("flags", rows.get("Features", ""))
    if not features:
        raise Unencodable("cpu", "/proc/cpuinfo names no features")
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    return {
        "architecture": platform.machine(),
        "model": " ".join(rows[name] for name in names if name in rows),
        "features": sorted(set(features.split())),
    }


# LLVM keeps to vectors of 256 bit where the processor has 512: the first ones that had them lowered their clock for it.
# This instruction set came with those that do not (Ice Lake, Zen 4).
_WIDE, _WIDTH = "avx512_vbmi2", "xla_cpu_prefer_vector_width"


@functools.cache
def _options() -> dict[str, Any]:
    """How XLA is to compile for this processor. What the user says in XLA_FLAGS goes first."""
    try:
        wide = _WIDE in cpu()["features"] and _WIDTH not in os.environ.get("XLA_FLAGS", "")
    except Unencodable:
        wide = False
    return {_WIDTH: 512} if wide else {}


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile for this processor."""
    options = _options()
    try:
        return lowered.compile(compiler_options=dict(options))
    except (RuntimeError, ValueError) as error:
        if not any(name in str(error) for name in options):
            raise
        options.clear()  # another version of XLA, which has none of that name
        return lowered.compile()
