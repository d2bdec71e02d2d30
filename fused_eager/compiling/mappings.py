"""How many memory mappings a process may have, and how many it has.

XLA maps each kernel of an executable for itself: some sixty mappings for a layer of a model. Linux allows 65,530 in a
process (`vm.max_map_count`), and past that not even `malloc` works. So before it comes to that all executables are
forgotten; those that are needed again come from the cache, or are compiled again.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

EVERY = 16  # calls between two counts: counting takes as long as there are mappings, 20 ms at the limit
SHARE = 0.6  # of what is allowed; the program and torch need some as well
_LIMIT, _MAPS = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
_calls = count(1)


def crowded() -> tuple[int, int] | None:
    """Mappings and their limit, if there are too many; None otherwise, and where nobody counts them."""
    return beyond(SHARE) if next(_calls) % EVERY == 0 else None


def beyond(share: float) -> tuple[int, int] | None:
    """Mappings and their limit, if they take more than a share of it; None otherwise, and where nobody counts them."""
    try:
        limit = int(_LIMIT.read_text())
        with _MAPS.open("rb") as lines:
            here = sum(1 for _ in lines)
    except (OSError, ValueError):
        return None
    return (here, limit) if here > share * limit else None
