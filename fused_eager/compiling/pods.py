"""Pods on paper: a region compiled for all chips of a mesh, its arguments divided among them as the mesh says.

XLA's partitioner divides what is computed of them, and adds the collectives. Nothing of that is in the cache: it is
what the program would be, not what it is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from fused_eager.cache import Key
from fused_eager.fusion_rules.deferred import jax

from .. import xla
from ..lowering.failed import NodeFailed
from ..targets.device import TargetDevice
from ..targets.links import Link
from ..targets.mesh import Mesh, bytes_of
from ..targets.target import Target, TargetError
from ..targets.topology import devices
from .canonical import to_computation
from .compile import arguments_of, tracing_for
from .cross import Cost, Refusal, cost_of
from .remake import as_asked

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8, "c64": 8}
_KINDS = {
    "all-reduce": "allreduce", "all-gather": "allgather", "reduce-scatter": "reduce_scatter", "all-to-all": "alltoall",
    "collective-permute": "send",
}  # fmt: skip
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\((.*)")
_ARRAY = re.compile(r"\w+\[[\d,]*\]")


@dataclass(frozen=True, slots=True)
class Collective:
    """One that the partitioner has added: its kind, the bytes of the whole value, and the chips of its group."""

    kind: str
    bytes: int
    chips: int

    def seconds(self, link: Link) -> float:
        """What it takes where nothing else is sent."""
        kind, given = _KINDS[self.kind], self.bytes
        if kind in ("allgather", "reduce_scatter"):
            given += given // max(self.chips, 1)
        return link.seconds(kind, 2 * given if kind == "alltoall" else given, self.chips)


@dataclass(frozen=True, slots=True)
class OnPod:
    """A region on each chip of a mesh: the compiler's cost for one, its collectives, and how many of the region's
    arguments are divided."""

    cost: Cost
    collectives: tuple[Collective, ...]
    divided: int
    blobs: None = None


def on_pod(key: Key, target: Target, mesh: Mesh) -> OnPod | Refusal:
    """Compile the region in a key for the chips of a mesh, the first of a target's."""
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding, PartitionSpec

    from ..lowering.lower import Function

    device = TargetDevice(target)
    try:
        chips = devices(target)
        if len(chips) < mesh.chips:
            raise TargetError(f"{target} has {len(chips)} devices, and {mesh} takes {mesh.chips}")
        grid = np.array(chips[: mesh.chips]).reshape([n for _, n in mesh.axes])
        named = JaxMesh(grid, [name for name, _ in mesh.axes])
        with as_asked(key), tracing_for(device):
            computation = to_computation(key.parts["region"])
            function = Function(computation.nodes, computation.region, key.parts["check_bounds"])
            given = arguments_of(computation)
            parts = [mesh.divided(a.shape) for a in given]
            placed = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(named, PartitionSpec(*part)))
                for a, part in zip(given, parts, strict=True)
            ]
            donated = tuple(computation.region.donated)
            lowered = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*placed)
            compiled = xla.compiled(lowered, target.platform)
        return OnPod(cost_of(compiled), tuple(collectives(compiled.as_text())), sum(map(any, parts)))
    except NodeFailed as failed:
        return Refusal(failed.reason)
    except Exception as error:  # of many, and the others are worth going on
        return Refusal(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def collectives(text: str) -> list[Collective]:
    """Those in XLA's text of a compiled program. What is in a loop's body counts once."""
    found = []
    for line in text.splitlines():
        seen = _COLLECTIVE.search(line)
        if seen:
            made, kind, starts, rest = seen.groups()
            sizes = [bytes_of(array, _SIZES) for array in _ARRAY.findall(made)]
            chips = _group(rest)
            whole = max(sizes, default=0) if starts and kind != "all-reduce" else sum(sizes)
            found.append(Collective(kind, whole * (chips if kind == "reduce-scatter" else 1), chips))
    return found


def _group(text: str) -> int:
    """How many chips each group of a collective has, of the three ways in which XLA writes groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return listed[1].count(",") + 1
    if tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(tiled[2])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] *\{(.*?)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes.get(name, 1)) for name in re.findall(r"'(\w+)'", named[2]))
    return 2  # from one chip to another


def by_kind(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """How many there are of each kind, and their bytes."""
    count, nbytes = Counter(c.kind for c in found), Counter[str]()
    for c in found:
        nbytes[c.kind] += c.bytes
    return {kind: (n, nbytes[kind]) for kind, n in count.items()}
