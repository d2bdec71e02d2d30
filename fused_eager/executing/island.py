"""Islands: nodes that ATen runs, one by one, between XLA regions.

Values travel as *homes* (dense, in memory order). An island sees them as tensors with the program's own strides, and
what it writes goes to a copy: the old value may still be read by others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.geometry import Geometry, is_dense
from fused_eager.fusion_rules.lowering import leaves, map_leaves
from fused_eager.fusion_rules.spec import contiguous_strides

from ..devices.device import Device
from ..devices.host.device import HOST
from ..errors import IslandRefused
from ..log.events import LOG
from ..log.reasons import NOT_COMPILED
from ..log.site import describe
from ..planning.plan import Region, operands
from ..quiet import as_eager, default_dtype
from ..tracing.stream import Hole, Node, Ref, Result, place_of, targets_of

if TYPE_CHECKING:
    from ..config import Config


_told: set[OpOverload | str] = set()


def judge(config: Config, op: OpOverload | str, place: tuple[Any, ...] | None, why: str) -> None:
    """What the option `islands` says about an op, or what a text names, that is to run natively: refuse it, or say so
    once.

    Raises:
        IslandRefused: it is refused.
    """
    if config.islands == "allow":
        return
    site = describe(place)
    if config.islands == "refuse":
        raise IslandRefused(f"{op} would run natively at {site}: {why}")
    if op not in _told:
        _told.add(op)
        warnings.warn_explicit(f"{op} runs natively at {site}: {why}", UserWarning, site.file, site.line)


def tell(config: Config, op: OpOverload | str, place: tuple[Any, ...] | None, why: str, called: str = "") -> None:
    """Report an op, or what a text names, that runs natively, under the name `called` where it is no whole one.

    Raises:
        IslandRefused: as `judge`.
    """
    judge(config, op, place, why)
    LOG.emit("island", op=called or str(op), reason=why, site=str(describe(place)))


def tell_region(config: Config, nodes: Sequence[Node], region: Region, why: str) -> None:
    """Report a region that runs natively, by one line of each of its ops.

    Raises:
        IslandRefused: as `judge`.
    """
    for node in {nodes[i].op: nodes[i] for i in region.nodes}.values():
        tell(config, node.op, node.place, why)


def as_home(value: Any, of: Device = HOST) -> torch.Tensor:
    """A value of an execution as a dense tensor."""
    return value if isinstance(value, torch.Tensor) else of.fetch(value)


def view(home: torch.Tensor, g: Geometry) -> torch.Tensor:
    """The view `g` over a home."""
    flat = home.reshape(-1)
    if flat.dtype != g.dtype:
        # A storage may end with bytes that make no whole element of the other dtype.
        whole = flat.nbytes // g.dtype.itemsize * g.dtype.itemsize // flat.dtype.itemsize
        flat = flat[:whole].view(g.dtype)
    out = flat.as_strided(g.size, g.stride, g.offset)
    out = out.conj() if g.conj else out
    return out._neg_view() if g.neg else out


def to_home(t: torch.Tensor, result: Result) -> torch.Tensor:
    """An op's new output in the form in which values travel."""
    spec, (_, shape) = result.spec, result.home
    if tuple(t.shape) != spec.shape or t.dtype != spec.dtype:
        raise RuntimeError(f"ATen returned {t.dtype}{tuple(t.shape)} where shape inference promised {spec}")
    t = t.resolve_conj().resolve_neg()
    if t._is_zerotensor():  # forward-mode derivatives have such without memory
        t = torch.zeros(t.shape, dtype=t.dtype)
    strides_differ = any(n != 1 and a != b for n, a, b in zip(spec.shape, t.stride(), spec.strides, strict=True))
    if (strides_differ and t.numel()) or not is_dense(spec.shape, spec.strides):
        t = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype).copy_(t)
    size = shape if is_dense(spec.shape, spec.strides) else (t.untyped_storage().nbytes() // t.dtype.itemsize,)
    return t.as_strided(size, contiguous_strides(size), t.storage_offset())


def run_nodes(nodes: list[Node], region: Region, values: dict[int, Any], of: Device = HOST) -> None:
    """Run the nodes of an ATen region, reading and writing `values`.

    Raises:
        Exception: what the first op that failed raised, with eager's type; the message names the op and the line.
            What does not depend on it has been run.
    """
    first: Exception | None = None
    chosen = region.ended_by.code in NOT_COMPILED
    dying = _dying(nodes, region)
    with as_eager():
        for i in region.nodes:
            node = nodes[i]
            if any(v not in values for v in operands(node)):
                continue  # it depends on what has failed
            try:
                if node.default is torch.get_default_dtype():
                    run_node(node, values, of)
                else:
                    with default_dtype(node.default):
                        run_node(node, values, of)
            except Exception as error:
                if first is None:
                    first = annotated(error, node)
                    first.__cause__ = error
            if not chosen:
                LOG.count(f"island {node.op}")
            # As in eager, memory goes to the next op while it is still in the processor's cache.
            for vid in dying.get(i, ()):
                values.pop(vid, None)
    if first is not None:
        raise first


def _dying(nodes: list[Node], region: Region) -> dict[int, list[int]]:
    """After which node which values, made in the region, are not needed any more."""
    made = {r.vid for i in region.nodes for r in nodes[i].results}.difference(region.outputs)
    out: dict[int, list[int]] = {}
    for i in reversed(region.nodes):
        for vid in [*operands(nodes[i]), *[r.vid for r in nodes[i].results]]:
            if vid in made:
                made.discard(vid)
                out.setdefault(i, []).append(vid)
    return out


def named(nodes: list[Node], region: Region) -> str:
    """The ops of a region as an error speaks of them."""
    first = nodes[min(region.nodes)]
    count = f"{len(region.nodes)} ops, the first of them " if len(region.nodes) > 1 else ""
    return f"{count}{first.op} at {describe(first.place)}"


def annotated(error: Exception, node: Node) -> Exception:
    """The same exception, with the op and the user's line at the end of its message."""
    text = f"{error} (raised by {node.op} at {describe(node.place)})"
    try:
        return type(error)(text)
    except TypeError:
        return RuntimeError(f"{type(error).__name__}: {text}")


def run_node(node: Node, values: dict[int, Any], of: Device = HOST) -> None:
    """Run one node through ATen; inside `as_eager`, where it may have to do with complex numbers."""
    tensors = []
    copies: dict[int, torch.Tensor] = {}
    split = len(node.results) - len(node.targets)
    targets = targets_of(node) if node.targets else {}
    for position, use in enumerate(node.uses):
        if position not in targets:
            tensors.append(view(as_home(values[use.vid], of), place_of(node, use)))
            continue
        # A part is written of the whole value that it belongs to; one copy each, for the old one has other readers.
        vid, geometry = targets[position]
        if vid not in copies:
            copies[vid] = as_home(values[vid], of).clone()
        tensors.append(view(copies[vid], geometry))

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return tensors[leaf.index]
        return node.scalars[leaf.index] if isinstance(leaf, Hole) else leaf

    out = node.op(*[map_leaves(fill, a) for a in node.args], **{k: map_leaves(fill, v) for k, v in node.kwargs.items()})
    written = {id(tensors[p]) for p in node.targets}
    fresh = [t for t in leaves([out]) if isinstance(t, torch.Tensor) and id(t) not in written]
    for result, t in zip(node.results[:split], fresh, strict=True):
        values[result.vid] = to_home(t, result)
    for position, (vid, geometry), result in zip(node.targets, targets.values(), node.results[split:], strict=True):
        if tuple(tensors[position].shape) != geometry.size:
            # Only the copy has been: the program's tensor would not be what it is in eager.
            raise RuntimeError(f"ATen has resized to {tuple(tensors[position].shape)} what it was to write")
        copy = copies[vid]
        values[result.vid] = copy.reshape(-1).view(result.home[0]).reshape(result.home[1])
