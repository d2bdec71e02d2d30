"""Validating what each stage hands to the next, where the options ask for it (`validate`; modes debug and strict).

What they find is a defect of the library and never of the program: it is told with the stage, the op and the line
before anything wrong is computed or bound.

| stage | what checks it |
|---|---|
| shape inference | `tracing.rehearsal.rehearse`, in every mode: ATen runs small or unusual calls on zeros |
| recording | `recorded`, as a stream is planned |
| recording, following | `read`, each time that a stream is run: what it reads is what its nodes were made for |
| planning | `planning.plan.validate` |
| keys | `keyed`: the two levels of a key agree on what is another region, and a key can be turned back |
| lowering | `fusion_rules.lowering.conform` for each op, `compiling.compile` for a region's function, in every mode |
| compiling, entries of the cache | `compiling.executable.misfit` in every mode: bytes taken and returned; `loaded` |
| running | `given` and `computed`; `executing.island.to_home` in every mode for what ATen returns |
| binding | `bound` before anything runs, `assigned` after |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fused_eager.cache import Unencodable
from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.lowering import leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ..bounded import Bounded
from ..compiling import canonical
from ..compiling.key import Computation, identity
from ..devices.home import Home, nbytes_of
from ..errors import ValidationError
from ..log.site import describe
from ..planning.plan import Plan, Region
from ..tracing.stream import Hole, NativeInput, Node, Ref, Stream, Use, starts

if TYPE_CHECKING:
    from ..compiling.executable import Executable
    from ..devices.buffer import Buffer


def recorded(nodes: Sequence[Node], homes: Mapping[int, Home]) -> None:
    """Check what recording hands to planning.

    Raises:
        ValidationError: a node reads what is not there yet, or beyond its end, makes a value twice or another one than
            it says, or its arguments do not fit its reads and numbers.
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
        if beyond := [u.vid for u in node.uses if not _reads_inside(node, u, homes[u.vid])]:
            fail(f"reads beyond the end of values {beyond}")
        if unbased := [r.base for r in node.results if r.base is not None and r.base not in there]:
            fail(f"writes into values {unbased}, which are not there yet")
        for r, at in zip(node.results, starts(node), strict=True):
            begin = 0 if at is None else int(node.scalars[at])
            if not 0 <= begin + _end(r.geometry) <= _length(r.home, r.geometry.dtype):
                fail(f"makes value {r.vid} beyond the end of its home {r.home}")
        there.update(r.vid for r in node.results)


def _end(g: Geometry) -> int:
    """One more than the last element that a view reaches."""
    return 0 if 0 in g.size else g.offset + 1 + sum((n - 1) * st for n, st in zip(g.size, g.stride, strict=True))


def _length(home: Home, dtype: torch.dtype) -> int:
    return nbytes_of(home) // dtype.itemsize


def _reads_inside(node: Node, use: Use, home: Home) -> bool:
    length = _length(home, use.geometry.dtype)
    if use.start is None:
        return use.geometry.offset >= 0 and _end(use.geometry) <= length
    begin = node.scalars[use.start] if use.start < len(node.scalars) else -1
    return _end(use.geometry) <= use.extent and 0 <= begin <= length - use.extent


def read(stream: Stream) -> None:
    """Check the memory that a stream reads, whoever has recorded or followed it.

    Raises:
        ValidationError: it is not what its nodes were made for.
    """
    for item in stream.inputs:
        if isinstance(item, NativeInput):
            has, needed = item.storage.nbytes(), item.offset + nbytes_of(item.home)
            if item.offset < 0 or needed > has:
                what = f"value {item.vid} is {needed} bytes of a storage that has {has}"
                raise ValidationError(f"recording: {what}; {_reader(stream, item.vid)}")
        elif item.array is not None and _is_other(item.array, item.home):
            found = item.array.dtype, item.array.shape
            what = f"value {item.vid} is taken for {item.home}, and is {found}"
            raise ValidationError(f"recording: {what}; {_reader(stream, item.vid)}")


def _reader(stream: Stream, vid: int) -> str:
    """Who reads an input of a stream first, in words."""
    for i, node in enumerate(stream.nodes):
        if vid in {*(u.vid for u in node.uses), *(r.base for r in node.results)}:
            return f"node {i} of {len(stream.nodes)}, {node.op} at {describe(node.place)}, reads it first"
    return f"none of {len(stream.nodes)} nodes reads it"


def _is_other(value: Any, home: Home) -> bool:
    """Whether a value of an execution, an array or a tensor, has another dtype or shape than its home."""
    dtype, shape = home
    return value.dtype != (dtype if isinstance(value, torch.Tensor) else JAX_DTYPE[dtype]) or value.shape != shape


_REGIONS: Bounded[Hashable, str] = Bounded(4096)  # by the key of this process, digests of what other processes call it


def keyed(computation: Computation) -> None:
    """Check the key of a region, whose two levels are made apart from one another.

    Raises:
        ValidationError: what other processes know it by cannot be turned back into it, or tells it from another region
            that has the same key in this process.
    """
    try:
        parts = canonical.to_parts(computation)
    except Unencodable:
        return
    try:
        back = canonical.to_parts(canonical.to_computation(parts))
    except (ValueError, LookupError) as error:
        raise ValidationError(f"keys: that of {computation.name} cannot be turned back: {error}") from error
    text = json.dumps(parts, sort_keys=True)  # in which a NaN equals itself, and zero has a sign
    if json.dumps(back, sort_keys=True) != text:
        raise ValidationError(f"keys: that of {computation.name} stands for another region as well")
    digest = hashlib.sha256(text.encode()).hexdigest()
    if _REGIONS.setdefault(identity(computation, ()), digest) != digest:
        raise ValidationError(f"keys: {computation.name} has the key of another region in this process")


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


def given(region: Region, nodes: Sequence[Node], homes: Mapping[int, Home], arrays: Sequence[Any]) -> None:
    """Check what an executable is about to be called with: it looks at the number and the sizes alone.

    Raises:
        ValidationError: a value of another dtype or shape than the region was compiled for.
    """
    for vid, array in zip(region.inputs, arrays, strict=True):
        if _is_other(array, homes[vid]):
            what = f"value {vid} as {array.dtype}{tuple(array.shape)}, and not as {homes[vid]}"
            raise ValidationError(f"running: {_where(nodes, region)} are given {what}")


def computed(
    region: Region,
    nodes: Sequence[Node],
    homes: Mapping[int, Home],
    outputs: Sequence[Any],
    flags: Any,
    checks: Sequence[Any],
) -> None:
    """Check what an executable has returned, before anybody gets it. Waits for nothing.

    Raises:
        ValidationError: too few or too many, or of another dtype or shape than was promised.
    """
    if tuple(flags.shape) != (max(len(checks), 1), 2):
        raise ValidationError(f"running: flags {flags.shape} for {len(checks)} checks of {_where(nodes, region)}")
    if len(outputs) != len(region.outputs):
        raise ValidationError(
            f"running: {len(outputs)} outputs for {len(region.outputs)} values of {_where(nodes, region)}"
        )
    for vid, array in zip(region.outputs, outputs, strict=True):
        dtype, shape = homes[vid]
        made_as = JAX_DTYPE[array.dtype] if isinstance(array, torch.Tensor) else np.dtype(array.dtype)
        found = made_as, tuple(array.shape)
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


def assigned(pairs: Sequence[tuple[Buffer, int]], values: Mapping[int, Any]) -> None:
    """Check the values that storages are about to receive.

    Raises:
        ValidationError: one of another dtype or shape than the storage's.
    """
    for b, vid in pairs:
        if vid in values and b.home is not None and _is_other(values[vid], b.home):
            found = values[vid].dtype, tuple(values[vid].shape)
            raise ValidationError(f"binding: a storage waits for {b.home}, and receives {found}")


def _where(nodes: Sequence[Node], region: Region) -> str:
    first = nodes[region.nodes[0]]
    return f"{len(region.nodes)} ops from {first.op} at {describe(first.place)}"
