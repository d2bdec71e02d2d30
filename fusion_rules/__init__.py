"""What each ATen op is, how it is lowered to JAX, and the named rules by which nodes may share a region.

Knows op classes and specs, never the runtime. The table is filled from the family modules when it is first asked for
(`families`): take it from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rule import OpClass, Promote, Rule, functional_twin, rule, rule_for

if TYPE_CHECKING:
    from .rule import RULES


def __getattr__(name: str) -> Any:
    if name != "RULES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import families
    from .rule import RULES

    families.load()
    return RULES


__all__ = ["RULES", "OpClass", "Promote", "Rule", "functional_twin", "rule", "rule_for"]
