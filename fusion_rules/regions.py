"""The named rules by which a node may join a region. A refusal is a value that says which rule, never a bare False."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the rules look at: a node that wants to join a region which holds `size` nodes of at most `limit`.

    `repeat` says of which repeated layers this node begins another one, "" if of none; `room` what the region
    would take for its temporaries without a cut there, "" if none is needed.
    """

    size: int
    limit: int
    repeat: str = ""
    room: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node may not join: the reason code, and the particulars."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class FusionRule:
    """A named condition. `refuse` returns the particulars of a refusal, "" to let the node in."""

    code: str
    refuse: Callable[[Candidate], str]


FUSION_RULES: tuple[FusionRule, ...] = (
    # Equal layers are one compilation, however many there are.
    FusionRule("region.repeat", lambda c: c.repeat if c.size else ""),
    # Temporaries are one block of memory, and the heap keeps blocks for the next run only up to a size.
    FusionRule("region.memory", lambda c: c.room if c.size else ""),
    # Compile time grows faster than linearly with a region's size; a bound keeps it in seconds.
    FusionRule("region.size", lambda c: f"{c.size} ops" if c.size >= c.limit else ""),
)


def refuse(candidate: Candidate) -> Refusal | None:
    """The first rule that keeps the node out; None if it may join."""
    for rule in FUSION_RULES:
        detail = rule.refuse(candidate)
        if detail:
            return Refusal(rule.code, detail)
    return None
