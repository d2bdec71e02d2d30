"""Temporaries: a region that would take more memory at once than the heap keeps is cut.

XLA takes the temporaries of a region as one block, and glibc keeps none of `heap.LARGE` bytes and more: a training step
that remembers 130 MB from its forward for its backward pass would fault on each of their pages, in each step. What
goes from one region to the next is allocated value by value, kept by the heap and freed when it has been read. XLA can
be told to take several blocks instead (`xla_multiheap_size_constraint_per_heap`), but an executable that does cannot be
serialised, so that no other process would ever have it.

How much a region takes is up to XLA's scheduler, which computes early what it can (159 MB where no more than 16 MB have
to wait at any time), and to what it turns for a product. So all values that stay inside of a region count, and they may
be half of what the heap would keep. Cut is in front of products and convolutions alone, with which XLA fuses nothing: a
chain of pointwise ops stays whole, however large.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from .borrow import Home, nbytes_of
from .heap import LARGE
from .order import operands
from .repeats import is_heavy
from .stream import Node

MOST = LARGE // 2  # bytes of values that a region keeps to itself


def boundaries(
    nodes: Sequence[Node],
    members: Sequence[int],
    homes: Mapping[int, Home],
    handed_out: Collection[int],
    cuts: Collection[int],
) -> dict[int, str]:
    """Where to cut a region of `members`: the first node after each cut, and what for, in words.

    Args:
        nodes: the stream.
        members: the region, by node index, in an order in which it may run.
        homes: dtype and shape of every value.
        handed_out: values that are needed elsewhere, so that they are no temporaries.
        cuts: nodes in front of which it is cut already.
    """
    made = {r.vid: p for p, i in enumerate(members) for r in nodes[i].results}
    read = {v: p for p, i in enumerate(members) for v in operands(nodes[i]) if v in made}  # last
    values = [v for v in read if v not in handed_out]
    lives = np.array([(made[v], read[v], nbytes_of(homes[v])) for v in values], np.int64).reshape(-1, 3)
    if _nbytes(lives) <= MOST:
        return {}
    heavy = np.array([p for p, i in enumerate(members) if is_heavy(nodes[i])], np.int64)
    edges = [0, *(p for p, i in enumerate(members) if p and i in cuts), len(members)]
    parts = list(zip(edges, edges[1:], strict=False))
    found: dict[int, str] = {}
    while parts:
        low, high = parts.pop()
        inside = lives[(lives[:, 0] >= low) & (lives[:, 1] < high)]
        places = heavy[(heavy > low) & (heavy < high)]
        if _nbytes(inside) <= MOST or not len(places):
            continue
        larger = [max(_nbytes(inside[inside[:, 1] < p]), _nbytes(inside[inside[:, 0] >= p])) for p in places]
        at = int(places[np.argmin(larger)])
        found[members[at]] = f"{_nbytes(inside) / 2**20:.0f} MB of temporaries"
        parts += [(low, at), (at, high)]
    return found


def _nbytes(lives: np.ndarray) -> int:
    return int(lives[:, 2].sum())
