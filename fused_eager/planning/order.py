"""The canonical order of a region's nodes: equal computations are one, in whatever order their steps were recorded.

Two branches that do not depend on each other may be written, or called by autograd, in either order. Colors are
refined as in the Weisfeiler-Leman test for graph isomorphism (1968): first each node is told what it computes, from
the inputs on; then, from the outputs back, who uses it; then, once more from the inputs, what its operands turned out
to be. Nodes are then taken as their operands allow, the smallest color first. Where two are alike even so, the one
whose operands came first is first. Nodes that are alike and yet not interchangeable cost a second compilation, never a
wrong one: a key says everything.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from fused_eager.cache import Unencodable

from ..devices.home import Home
from ..tracing.stream import Node
from . import forms


def operands(node: Node) -> list[int]:
    """The values that a node reads, those that it writes into included."""
    return [u.vid for u in node.uses] + [r.base for r in node.results if r.base is not None]


def canonical(
    nodes: Sequence[Node],
    members: Sequence[int],
    homes: Mapping[int, Home],
    outputs: Collection[int],
    free: Collection[int],
) -> list[int]:
    """The indices `members` in canonical order; as they are, where an argument has no form of its own.

    Args:
        nodes: the stream.
        members: node indices in an order in which they may run.
        homes: dtype and shape of every value.
        outputs: the values that are handed out.
        free: the inputs whose memory may be reused.
    """
    try:
        own = {i: _color(forms.of_node(nodes[i], "", defaultdict(int))) for i in members}
    except Unencodable:
        return list(members)
    made = {r.vid: (i, k) for i in members for k, r in enumerate(nodes[i].results)}
    reads = {i: operands(nodes[i]) for i in members}
    uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i in members:
        for position, vid in enumerate(reads[i]):
            uses[vid].append((i, position))

    def downwards(color: Mapping[int, bytes], inputs: Mapping[int, bytes]) -> dict[int, bytes]:
        out: dict[int, bytes] = {}
        for i in members:
            known = [(out[made[v][0]], made[v][1]) if v in made else inputs[v] for v in reads[i]]
            out[i] = _color([color[i], known])
        return out

    def used(vid: int, color: Mapping[int, bytes]) -> list[tuple[bytes, int]]:
        return sorted((color[i], position) for i, position in uses[vid])

    plain = {v: _color([homes[v], v in free]) for v in uses if v not in made}
    first = downwards(own, plain)
    back: dict[int, bytes] = {}
    for i in reversed(members):
        back[i] = _color([first[i], [(used(r.vid, back), r.vid in outputs) for r in nodes[i].results]])
    told = {v: _color([color, used(v, back)]) for v, color in plain.items()}
    return _taken(members, downwards(back, told), reads, made, nodes)


def _taken(
    members: Sequence[int],
    color: Mapping[int, bytes],
    reads: Mapping[int, list[int]],
    made: Mapping[int, tuple[int, int]],
    nodes: Sequence[Node],
) -> list[int]:
    waits = {i: len({made[v][0] for v in reads[i] if v in made}) for i in members}
    frees: dict[int, set[int]] = defaultdict(set)
    for i in members:
        for v in reads[i]:
            if v in made:
                frees[made[v][0]].add(i)
    number: dict[int, int] = {}  # of a value, in the order in which they appear

    def rank(i: int) -> tuple[bytes, list[int], int]:
        return color[i], [number.get(v, len(made) + len(number)) for v in reads[i]], i

    ready = [rank(i) for i in members if waits[i] == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)[2]
        order.append(i)
        for vid in (*reads[i], *(r.vid for r in nodes[i].results)):
            number.setdefault(vid, len(number))
        for j in sorted(frees[i]):
            waits[j] -= 1
            if waits[j] == 0:
                heapq.heappush(ready, rank(j))
    return order


def _color(value: Any) -> bytes:
    return blake2b(repr(value).encode(), digest_size=12).digest()
