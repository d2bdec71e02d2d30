"""Keys: when are two regions the same computation?

In-process identity is a tuple with value numbers local to the region, so equal layers of a model have equal keys
wherever they stand in the stream. Liveness (which values are outputs) and donation are part of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ..memory.buffers import Home
from ..planning.plan import Region
from ..tracing.stream import Node


def identity(nodes: Sequence[Node], region: Region, homes: Mapping[int, Home], flags: Hashable) -> Hashable:
    """The in-process key of an XLA region. `flags` are the options that change the code made for it."""
    local: dict[int, int] = {}
    for vid in region.inputs:
        local[vid] = len(local)
    body = []
    for i in region.nodes:
        node = nodes[i]
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
    )
