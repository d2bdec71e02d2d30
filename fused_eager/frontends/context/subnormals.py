"""Subnormal numbers: XLA flushes them to zero, so a program that asks for them by name has torch run its ops.

`torch.set_flush_denormal(False)` inside a context is heard in its thread, until it is called with True or the context
ends. It has no op, and torch does not tell what was asked for: the processor's flags are those of a program that asked
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...executing.island import tell
from ...executing.materialize import materialize_all
from ...log import site
from ...log.reasons import Reason
from .intercept import FrontDoor
from .readers import Guard, StandIn
from .threads import THREAD

_WHAT = "what follows torch.set_flush_denormal(False)"
_WHY = "it asks for subnormal numbers, which regions flush to zero"


def rows() -> tuple[tuple[Any, str, Callable[[Any], Any]], ...]:
    """What is patched: owner, name, and what makes that which stands for it."""
    return ((torch, "set_flush_denormal", _hearing),)


def _hearing(original: Callable[..., Any]) -> StandIn:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)  # False: this processor cannot
        door = THREAD.door
        if done and door is not None and door.keeps_subnormals is args[0]:
            if not args[0]:
                tell(THREAD.configs[-1], _WHAT, site.here(), _WHY)
            _switch(door, not args[0])
        return done

    return StandIn(Guard(torch, "set_flush_denormal"), original, call)


def _switch(door: FrontDoor, keeps: bool) -> None:
    door.come_back()
    materialize_all(Reason("cut.options"), only=door.stream)
    door.keeps_subnormals = keeps
    door.take(door.allowed(THREAD.configs[-1]))
