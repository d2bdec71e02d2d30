"""A collective inside a region. The region is one program of all its ranks' devices then, by the name of their mesh."""

from __future__ import annotations

from typing import Any

from .collectives import PROGRAMS
from .lowering import Context
from .rule import OpClass, rule


# Other ranks wait for it, whether this one reads the result or not.
@rule("fused_eager.collective.default", OpClass.COLLECTIVE, may_raise=True)
def collective(cx: Context, x: Any, program: str, kind: str, devices: str, number: int) -> Any:
    """What one of `collectives.PROGRAMS` makes of this rank's part, flat."""
    return PROGRAMS[program](x, kind=kind, size=devices.count(",") + 1)
