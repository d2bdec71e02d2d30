"""The module `torch.tpu.distributed`: ranks of one process, and `spmd_safe`."""

from __future__ import annotations

import types
from typing import Any

from .promised import spmd_safe


class _Module(types.ModuleType):
    """Its functions, of which `spawn` is imported when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name != "spawn":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: it has spawn and spmd_safe")
        from .threads import spawn

        return spawn


def module(name: str) -> types.ModuleType:
    """The module `torch.<name>.distributed`."""
    made = _Module(f"torch.{name}.distributed", __doc__)
    made.spmd_safe = spmd_safe  # type: ignore[attr-defined]
    return made


__all__ = ["module", "spmd_safe"]
