"""Parts with gaps that begin elsewhere from round to round: `x[:, i : i + 8]`, where the host has no memory of them.

Such a part of the host's memory is an input of its own, wherever it begins. Elsewhere it is read within the stream, and
where it begins would be part of what is compiled: a slice that moves on would be compiled anew in every round. So from
the second place on at which the same op on the same line is seen to read, it is a number like others. A gapless part is
from the start (`record`); most parts with gaps (a chunk of the channels) stay where they are, and are better known.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..bounded import Bounded

# Where each operand that has gaps was seen first; None once it has been seen elsewhere.
_FIRST: Bounded[Hashable, int | None] = Bounded(4096)


def is_seen_to_move(operand: Hashable, offset: int) -> bool:
    """Whether an operand has begun anywhere else before."""
    first = _FIRST.get(operand, offset)
    if first is not None:
        _FIRST[operand] = first = first if first == offset else None
    return first is None
