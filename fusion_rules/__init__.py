"""What each ATen op is, how it is lowered to JAX, and the named rules by which nodes may share a region.

Knows op classes and specs, never the runtime. Importing this package fills the table from the family modules.
"""

from __future__ import annotations

import importlib
import pkgutil

from .rule import RULES, OpClass, Promote, Rule, functional_twin, rule, rule_for

# Families are found, not listed: a new module `fusion_rules/lower_*.py` is part of the table by existing.
for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name.startswith("lower_")):
    importlib.import_module(f"{__name__}.{_module}")
# What single platforms have of their own comes after what it stands beside.
for _platform in ("xla_cpu", "xla_tpu"):
    for _module in sorted(m.name for m in pkgutil.iter_modules([f"{p}/{_platform}" for p in __path__])):
        importlib.import_module(f"{__name__}.{_platform}.{_module}")

__all__ = ["RULES", "OpClass", "Promote", "Rule", "functional_twin", "rule", "rule_for"]
