"""Guards of torch's that put back the dispatch keys of a thread when they end, among them what says that it has modes.

Our mode leaves the thread's stack of modes and comes back to it (`bypass`), and may do so inside of such a guard: in
inference mode, in a function that `torch.compile` has made, where a fake tensor is made. Then the keys would say that
there are modes where there are none, and torch would fail; or the other way round, and nothing would be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...quiet import restore_keys, stack

GUARDS = ("_InferenceMode", "_ForceDispatchKeyGuard", "_PreserveDispatchKeyGuard")  # of `torch._C`


def agreeing(original: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a guard after which keys and modes agree, if the modes have changed within."""

    class Agreeing:
        __slots__ = ("guard", "modes")

        def __init__(self, *args: Any):
            self.guard = original(*args)

        def __enter__(self) -> None:
            self.modes = stack()
            self.guard.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.guard.__exit__(*error)
            if stack() != self.modes:
                restore_keys()

    return Agreeing


def rows() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What is patched while a context is open: owner, name, and what makes the patch."""
    for name in GUARDS:
        yield torch._C, name, agreeing
