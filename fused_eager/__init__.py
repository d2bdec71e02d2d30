"""Eager PyTorch, traced on the fly and fused by XLA.

>>> from fused_eager import fused_eager
>>> with fused_eager():
...     train()
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config, OptionError
    from .errors import BudgetExceeded, ExportError, FusedEagerError, IslandRefused, LostValue, WrongResult
    from .frontends.compiler.exporting import Exported, export
    from .frontends.context.context import current_mode, fused_eager, sync
    from .frontends.device.registration import register
    from .frontends.kernels.declare import jax_op
    from .frontends.kernels.op import JaxOp
    from .frontends.kernels.pallas import PallasOp, pallas_op
    from .frontends.kernels.program import KernelError
    from .ranks.faults import CollectivesDiffer, RankLost
    from .reporting.expecting import expect
    from .reporting.explaining import Explanation, explain
    from .reporting.report import Report, report

# Loaded at first use, so that `python -m fused_eager doctor` can report a torch or JAX that does not import.
_HOMES = {
    "BudgetExceeded": "errors",
    "CollectivesDiffer": "ranks.faults",
    "Config": "config",
    "Explanation": "reporting.explaining",
    "ExportError": "errors",
    "Exported": "frontends.compiler.exporting",
    "FusedEagerError": "errors",
    "IslandRefused": "errors",
    "JaxOp": "frontends.kernels.op",
    "KernelError": "frontends.kernels.program",
    "LostValue": "errors",
    "OptionError": "config",
    "PallasOp": "frontends.kernels.pallas",
    "RankLost": "ranks.faults",
    "Report": "reporting.report",
    "WrongResult": "errors",
    "current_mode": "frontends.context.context",
    "expect": "reporting.expecting",
    "explain": "reporting.explaining",
    "export": "frontends.compiler.exporting",
    "fused_eager": "frontends.context.context",
    "jax_op": "frontends.kernels.declare",
    "pallas_op": "frontends.kernels.pallas",
    "register": "frontends.device.registration",
    "report": "reporting.report",
    "sync": "frontends.context.context",
}

__all__ = [
    "BudgetExceeded",
    "CollectivesDiffer",
    "Config",
    "Explanation",
    "ExportError",
    "Exported",
    "FusedEagerError",
    "IslandRefused",
    "JaxOp",
    "KernelError",
    "LostValue",
    "OptionError",
    "PallasOp",
    "RankLost",
    "Report",
    "WrongResult",
    "current_mode",
    "expect",
    "explain",
    "export",
    "fused_eager",
    "jax_op",
    "pallas_op",
    "register",
    "report",
    "sync",
]


def _imported(home: str) -> ModuleType:
    """One of our modules; some bring JAX along, whose objects Python's collector is to go through once and no more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f".{home}", __name__)
    finally:
        if collects:
            many = gc.get_count()[0] > 100_000
            gc.enable()
            if many:
                from .fusion_rules.deferred import go_through_once

                go_through_once()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_imported(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
