"""Eager PyTorch, traced on the fly and fused by XLA.

>>> from fused_eager import fused_eager
>>> with fused_eager():
...     train()
"""

from __future__ import annotations

from .config import Config, OptionError
from .context import current_mode, fused_eager, sync
from .errors import FusedEagerError, IslandRefused, LostValue
from .report import Report, report

__all__ = [
    "Config",
    "FusedEagerError",
    "IslandRefused",
    "LostValue",
    "OptionError",
    "Report",
    "current_mode",
    "fused_eager",
    "report",
    "sync",
]
