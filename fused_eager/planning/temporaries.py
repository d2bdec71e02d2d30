"""Temporaries: a region that would take more memory at once than the heap keeps is cut.

XLA takes the temporaries of a region as one block, and glibc keeps none of 60 MB and more: a training step that
remembers 130 MB from its forward for its backward pass would fault on each of their pages, in each step. What
goes from one region to the next is allocated value by value, kept by the heap and freed when it has been read. XLA can
be told to take several blocks instead (`xla_multiheap_size_constraint_per_heap`), but an executable that does cannot be
serialised, so that no other process would ever have it.

XLA computes everything as soon as what it reads is there: the way back of a ResNet-18 takes 159 MB, where no more than
16 have to wait at any time in the program's order. So what a region takes is estimated in steps, each of which
computes all that can be computed, with two things that wait besides values: what is computed of a value that was handed
in, until the rest of its node can be (the half of the derivative of GELU that does not need the gradient), and operands
that are turned for a product. XLA takes between a third of that and one and a half times as much. Cut is in front of
products and convolutions alone, with which XLA fuses nothing: a chain of pointwise ops stays whole, however large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from ..devices.home import Home, nbytes_of
from ..tracing.stream import Node
from .order import operands
from .repeats import is_heavy

TURNING = 3  # steps that an operand is turned in: something to begin with, the loop, and what comes out of it


def boundaries(
    nodes: Sequence[Node],
    members: Sequence[int],
    homes: Mapping[int, Home],
    handed_out: Collection[int],
    cuts: Collection[int],
    most: int,
) -> dict[int, str]:
    """Where to cut a region of `members`: the first node after each cut, and what for, in words.

    Args:
        nodes: the stream.
        members: the region, by node index, in an order in which it may run.
        homes: dtype and shape of every value.
        handed_out: values that are needed elsewhere, so that they are no temporaries.
        cuts: nodes in front of which it is cut already.
        most: bytes that a region may take.
    """
    last = {v: p for p, i in enumerate(members) for v in operands(nodes[i])}  # who reads it
    if 2 * sum(nbytes_of(homes[v]) for v in last) <= most:
        return {}
    inner = {v: p for v, p in last.items() if v not in handed_out}
    heavy = [p for p, i in enumerate(members) if is_heavy(nodes[i])]
    edges = [0, *(p for p, i in enumerate(members) if p and i in cuts), len(members)]
    found: dict[int, str] = {}
    for low, high in pairwise(edges):
        places = [p for p in heavy if low < p < high]
        while places:
            until = partial(_most_at_once, _waits(nodes, members, homes, inner, range(low, high)))
            if until(high) <= most:
                break
            enough = bisect_right(places, most, key=until)
            at = places[max(enough - 1, 0)]
            found[members[at]] = f"{until(high) / 2**20:.0f} MB of temporaries"
            low, places = at, [p for p in places if p > at]
    return found


def _waits(
    nodes: Sequence[Node], members: Sequence[int], homes: Mapping[int, Home], inner: Mapping[int, int], part: range
) -> np.ndarray:
    """What waits in a part of the region, `[N, 4]`: position of the last node to read it, the first and the last step,
    bytes. `inner` has those positions for values."""
    made: dict[int, int] = {}  # value: the step that makes it; the first is 1
    read: dict[int, int] = {}  # value: the last step that reads it
    waits: list[tuple[int, int, int, int]] = []
    for p in part:
        node = nodes[members[p]]
        heavy = is_heavy(node)
        # The left one of a product's two operands.
        turned = {use.vid for use in node.uses[-2:-1] if heavy and use.geometry.is_by_columns}
        ready = {v: made.get(v, 0) + TURNING * (v in turned) for v in operands(node)}
        step = max(ready.values(), default=0) + 1
        for v, there in ready.items():
            read[v] = max(read.get(v, 0), there - 1 if v in turned else step)
            if v in turned or (v not in made and not heavy and step > 1):
                waits.append((p, made.get(v, 0) + 1, step, nbytes_of(homes[v])))
        made.update((r.vid, step) for r in node.results)
    waits += ((inner[v], made[v], read[v], nbytes_of(homes[v])) for v in read if v in made and v in inner)
    return np.array(waits, np.int64).reshape(-1, 4)


def _most_at_once(waits: np.ndarray, end: int) -> int:
    """Bytes, in the nodes before position `end`. What is read later is handed out, and takes memory of its own."""
    inside = waits[waits[:, 0] < end]
    steps = np.zeros(inside[:, 2].max(initial=0) + 2, np.int64)
    np.add.at(steps, inside[:, 1], inside[:, 3])
    np.add.at(steps, inside[:, 2] + 1, -inside[:, 3])
    return int(steps.cumsum().max())
