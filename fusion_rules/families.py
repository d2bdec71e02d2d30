"""The modules that fill the table of lowerings.

They are found, not listed: a new module `fusion_rules/lower_*.py` is part of the table by existing. They are imported
when a row is first asked for, and JAX with them: a program that torch runs alone does without both.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import threading
from pathlib import Path

from .deferred import go_through_once

_LOCK = threading.RLock()  # a family may ask for a row of another one
_PLATFORMS = ("xla_cpu", "xla_tpu")
_filled = threading.Event()


def load() -> None:
    """Fill the table, unless it is."""
    if _filled.is_set():
        return
    with _LOCK:
        if _filled.is_set():
            return
        folder = Path(__file__).parent
        names = sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if m.name.startswith("lower_"))
        # What single platforms have of their own comes after what it stands beside.
        for platform in _PLATFORMS:
            names += sorted(f"{platform}.{m.name}" for m in pkgutil.iter_modules([str(folder / platform)]))
        collects = gc.isenabled()
        gc.disable()
        try:
            for name in names:
                importlib.import_module(f"{__package__}.{name}")
            _filled.set()
        finally:
            if collects:
                gc.enable()
                go_through_once()
