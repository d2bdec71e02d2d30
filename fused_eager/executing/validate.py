"""Validating what each stage hands to the next, where the options ask for it (`validate`; modes debug and strict).

One small function for each stage; that of `planning.plan` is beside it. What they find is a defect of the library and
never of the program: it is told with the stage, the op and the line before anything wrong is computed or bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fused_eager.fusion_rules.lowering import leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ..devices.home import Home
from ..errors import ValidationError
from ..log.site import describe
from ..planning.plan import Plan, Region
from ..tracing.stream import Hole, Node, Ref

if TYPE_CHECKING:
    from ..compiling.executable import Executable
    from ..devices.buffer import Buffer


def recorded(nodes: Sequence[Node], homes: Mapping[int, Home]) -> None:
    """Check what recording hands to planning.

    Raises:
        ValidationError: a node reads what is not there yet, makes a value twice or another one than it says, or its
            arguments do not fit its reads and numbers.
    """
    made = {r.vid for n in nodes for r in n.results}
    there = set(homes) - made
    for i, node in enumerate(nodes):

        def fail(what: str, i: int = i, node: Node = node) -> None:
            raise ValidationError(f"recording: node {i} ({node.op} at {describe(node.place)}) {what}")

        if late := [u.vid for u in node.uses if u.vid not in there]:
            fail(f"reads values {late}, which are not there yet")
        if twice := [r.vid for r in node.results if r.vid in there]:
            fail(f"makes values {twice}, which are there already")
        if other := [r.vid for r in node.results if homes.get(r.vid) != r.home]:
            fail(f"makes values {other} of another dtype or shape than the stream says")
        if node.targets and not (max(node.targets) < len(node.uses) and len(node.targets) <= len(node.results)):
            fail(f"writes its operands {node.targets}, and has {len(node.uses)}")
        for leaf in leaves([node.args, node.kwargs]):
            if isinstance(leaf, Ref) and leaf.index >= len(node.uses):
                fail(f"names operand {leaf.index}, and has {len(node.uses)}")
            if isinstance(leaf, Hole) and leaf.index >= len(node.scalars):
                fail(f"names number {leaf.index}, and has {len(node.scalars)}")
        there.update(r.vid for r in node.results)


def loaded(plan: Plan, executables: Sequence[Executable | None], nodes: Sequence[Node]) -> None:
    """Check what lowering and compiling hand to running.

    Raises:
        ValidationError: a region has no executable of its own, or one whose run-time checks speak of nodes that it has
            not.
    """
    if len(executables) != len(plan.regions):
        raise ValidationError(f"compiling: {len(executables)} executables for {len(plan.regions)} regions")
    for g, (region, executable) in enumerate(zip(plan.regions, executables, strict=True)):
        wrong = [c.node for c in executable.checks if not 0 <= c.node < len(region.nodes)] if executable else []
        if wrong:
            raise ValidationError(f"compiling: region {g} ({_where(nodes, region)}) has checks of nodes {wrong}")


def computed(region: Region, nodes: Sequence[Node], homes: Mapping[int, Home], outputs: Sequence[Any]) -> None:
    """Check what an executable has returned, before anybody gets it. Waits for nothing.

    Raises:
        ValidationError: too few or too many, or of another dtype or shape than was promised.
    """
    if len(outputs) != len(region.outputs):
        raise ValidationError(
            f"running: {len(outputs)} outputs for {len(region.outputs)} values of {_where(nodes, region)}"
        )
    for vid, array in zip(region.outputs, outputs, strict=True):
        dtype, shape = homes[vid]
        found = np.dtype(array.dtype), tuple(array.shape)
        if found != (JAX_DTYPE[dtype], tuple(shape)):
            made = next((i for i in region.nodes if any(r.vid == vid for r in nodes[i].results)), region.nodes[0])
            what = f"{nodes[made].op} at {describe(nodes[made].place)}"
            raise ValidationError(f"running: {what} returned {found[0]}{found[1]} where {dtype}{shape} was promised")


def bound(pairs: Sequence[tuple[Buffer, int]], homes: Mapping[int, Home]) -> None:
    """Check which values storages are about to receive.

    Raises:
        ValidationError: a storage waits for a value that the stream has not, or for one of another dtype or shape.
    """
    for b, vid in pairs:
        if homes.get(vid) != b.home:
            has = homes.get(vid, "nothing")
            raise ValidationError(f"binding: a storage waits for {b.home}, and value {vid} is {has}")


def _where(nodes: Sequence[Node], region: Region) -> str:
    first = nodes[region.nodes[0]]
    return f"{len(region.nodes)} ops from {first.op} at {describe(first.place)}"
