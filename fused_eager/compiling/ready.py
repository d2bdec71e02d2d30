"""Ready: what a stream has become when there is nothing left to plan or compile for it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..planning.plan import Plan
from ..policy.hotness import Compiled
from ..policy.segment import Pieces
from .executable import Executable


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan with its executables (None for ATen regions): everything a repeated stream needs."""

    plan: Plan
    executables: tuple[Executable | None, ...]
    checked: bool
    number: int  # names the plan in events
    # Of a plan that makes checks, for each region: the values written over inputs that tensors go back to if one fails.
    commits: tuple[frozenset[int], ...] = ()
    shapes: Hashable = None  # of a stream that runs on ATen because nothing is compiled for it
    unstable: bool = False  # and nothing will be, as they keep changing
    varies: bool = False  # a stream of any length is run like that
    pieces: Pieces | None = None  # what tells it from others in every process
    joint: str = ""  # the digest of those regions that are to be one program of several ranks
    alike: tuple[Compiled, ...] = ()  # what has to be told once this one comes again
