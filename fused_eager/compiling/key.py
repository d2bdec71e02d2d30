"""Keys: what is compiled, and when are two of it the same?

In-process identity is a tuple with value numbers local to the region, so equal layers of a model have equal keys
wherever they stand in the stream. Liveness (which values are outputs) and donation are part of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from ..devices.home import Home, nbytes_of
from ..log.site import describe
from ..planning.plan import Region, collective
from ..tracing.stream import Node

_NUMBER = 8  # bytes of a hoisted one: float64 or int64


@dataclass(frozen=True, slots=True)
class Computation:
    """What is compiled: a region, the nodes of the stream that it is part of, and the homes of their values.

    With `smaller` it is compiled for every size of a bucket, of which it has the largest, `size`; they are the same
    region at the least size and at one between these. The size of a call is then the last of its whole numbers.
    """

    nodes: Sequence[Node]
    region: Region
    homes: Mapping[int, Home]
    size: int = 0
    smaller: tuple[tuple[int, Computation], ...] = ()

    @property
    def kinds(self) -> list[type]:
        """The types of the numbers that it is called with, in order."""
        found = [type(s) for node in self.chosen for s in node.scalars]
        return [*found, int] if self.smaller else found

    def taken(self, scratch: Sequence[Home]) -> int:
        """The bytes that it is called with: of its inputs, its numbers and memory to work in."""
        given = [self.homes[v] for v in self.region.inputs]
        return sum(map(nbytes_of, (*given, *scratch))) + _NUMBER * len(self.kinds)

    @property
    def chosen(self) -> list[Node]:
        """The region's nodes, in its order."""
        return [self.nodes[i] for i in self.region.nodes]

    @property
    def devices(self) -> str:
        """The devices of the ranks whose one program it is, by name; "" of a region that this rank computes alone."""
        return next(filter(None, map(collective, self.chosen)), "")

    @property
    def name(self) -> str:
        """A short name for people: the number of ops, the first and the last line they came from."""
        among = self.region.nodes
        first, last = (describe(self.nodes[i].place) for i in (min(among), max(among)))
        where = f"{first}" if first == last else f"{first} to {last}"
        return f"{len(among)} {'op' if len(among) == 1 else 'ops'} from {where}"


def identity(computation: Computation, flags: Hashable) -> Hashable:
    """The in-process key of an XLA region. `flags` are the options that change the code made for it."""
    region, homes = computation.region, computation.homes
    local: dict[int, int] = {}
    for vid in region.inputs:
        local[vid] = len(local)
    body = []
    for node in computation.chosen:
        uses = tuple([(local[u.vid], *u[1:]) for u in node.uses])
        results = []
        for r in node.results:
            results.append((r.home, r.geometry, None if r.base is None else local[r.base]))
            local[r.vid] = len(local)
        body.append((node.signature[0], uses, tuple(results)))  # type: ignore[index]
    return (
        tuple(body),
        tuple([homes[v] for v in region.inputs]),
        tuple([local[v] for v in region.outputs]),
        region.donated,
        flags,
        *[(computation.size, size, identity(smaller, ())) for size, smaller in computation.smaller],
    )
