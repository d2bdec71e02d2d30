"""`spmd_safe`: the name by which TorchTPU's programs say that all ranks do the same."""

from __future__ import annotations

import contextlib
import threading
from typing import Any


class _Said(threading.local):
    depth = 0


_said = _Said()


class spmd_safe(contextlib.ContextDecorator):
    """The program says that in the body all ranks run the same ops, collectives included: `with spmd_safe():`, or
    `@spmd_safe()` and `@spmd_safe` on a function.

    It is a promise that may be used, and need not be: it changes no result. With `FUSED_EAGER_COLLECTIVES=regions`
    collectives are compiled into regions, in the body and outside of it, as the ranks are asked each time whether they
    run the same. Else a collective is a cut between two regions; the report says so where one has ended a region.
    """

    def __new__(cls, function: Any = None) -> Any:
        made = super().__new__(cls)
        return made if function is None else made(function)

    def __init__(self, function: Any = None):
        pass

    def __enter__(self) -> spmd_safe:
        _said.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        _said.depth -= 1


def of_a_cut(op: str) -> str:
    """What the report says of a collective that ends a region."""
    return f"{op} (spmd_safe: in a region with FUSED_EAGER_COLLECTIVES=regions)" if _said.depth else op
