"""Buckets: one executable for all sizes up to a bound, where it is proved that padding reaches no result.

Sizes lie in buckets that end at 8, 12, 16, 24, 32, 48 and so on, so that at most half of what is computed is padding. A
stream of any size in a bucket is run by the regions of the largest, which know the size (`lowering.padding`). That a
stream is one of these is seen from its nodes: every number in them has to be where those at three sizes say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from fused_eager.fusion_rules.deferred import jax
from fused_eager.fusion_rules.padded import Refused
from fused_eager.fusion_rules.precision import as_of

from ..devices.device import Device
from ..devices.dlpack import to_tensor
from ..devices.home import Home, nbytes_of
from ..devices.storage import pointer_of, storage_of
from ..lowering.failed import NodeFailed
from ..planning import plan
from ..planning.plan import Plan, Region, Work
from . import emit
from .caching import settings
from .compile import Computation, load_or_compile
from .executable import Executable
from .ready import Ready

KEPT = 4 << 20  # bytes of an executable's padded arguments whose memory is kept from call to call, at most
LEAST = 2  # torch.compile makes graphs of their own for the sizes 0 and 1


class Bucket(NamedTuple):
    """Sizes that share an executable: the largest, the least, and one between them, by which what is linear is told
    from what is not."""

    high: int
    low: int
    middle: int


def bucket_of(size: int) -> Bucket:
    """The bucket of a size of at least `LEAST`."""
    high, low = 8, LEAST
    while high < size:
        low, high = high + 1, high + high // 2 if high & (high - 1) == 0 else high // 3 * 4
    return Bucket(high, low, (high + low) // 2)


@dataclass(frozen=True, slots=True)
class Streams:
    """A stream of some size, and the same at the sizes of its bucket."""

    size: int
    bucket: Bucket
    now: Work
    high: Work
    low: Work
    middle: Work


@dataclass(frozen=True, slots=True)
class Planned:
    """What runs the streams of a bucket: the plan of the largest, and its executables, which know a stream's size."""

    plan: Plan
    executables: tuple[Executable | None, ...]
    checked: bool


def planned(streams: Streams, islands: dict[int, str]) -> Planned:
    """What runs the streams of a bucket, which one of them says.

    Raises:
        Refused: it is not the same stream at every size, or what is padded would be seen.
    """
    high, low = streams.high, streams.low
    if high.homes == low.homes and all(a.uses == b.uses and a.signature[0] == b.signature[0]  # type: ignore[index]
                                       for a, b in zip(high.nodes, low.nodes, strict=False)):  # fmt: skip
        raise Refused("no value changes its size")
    _check(streams)
    most, room = high.config.max_region, high.device.housekeeping.room
    made = plan.make_plan(high.nodes, high.live, frozenset(), high.homes, islands, most, high.reason, room=room)
    checked = any(plan.may_check(n) for n in high.nodes)
    try:
        with as_of(high.switches):
            executables = tuple([_executable(streams, region) for region in made.regions])
    except NodeFailed as failed:
        raise Refused(f"{high.nodes[failed.index].op} has no lowering: {failed.reason}") from failed
    return Planned(made, executables, checked)


def ready(streams: Streams, found: Planned) -> Ready:
    """A stream with the executables of its bucket.

    Raises:
        Refused: it is not the same stream as at other sizes.
    """
    _check(streams)
    now, pairs = streams.now, zip(found.plan.regions, found.executables, strict=True)
    executables = tuple([made and _of_size(streams, region, made) for region, made in pairs])
    return Ready(found.plan, executables, found.checked, emit.planned(found.plan, now.nodes, now.homes, executables))


def _executable(streams: Streams, region: Region) -> Executable | None:
    if region.how != "xla":
        return None
    bucket, high = streams.bucket, streams.high
    smaller = [(size, Computation(w.nodes, region, w.homes))
               for size, w in ((bucket.low, streams.low), (bucket.middle, streams.middle))]  # fmt: skip
    shared = Computation(high.nodes, region, high.homes, bucket.high, tuple(smaller))
    return load_or_compile(shared, settings(high.config, high.device))


def _of_size(streams: Streams, region: Region, made: Executable) -> Executable:
    checks = tuple([replace(c, message=_message_of_size(c.message, streams, region, c.node)) for c in made.checks])
    call = _Call(streams, region, made)
    fronts = frozenset([at for at, front in enumerate(call.inputs) if front is not None])
    return replace(made, call=call, checks=checks, key="", is_shared=True, tensors=fronts)


def _message_of_size(message: str, streams: Streams, region: Region, at: int) -> str:
    """What a check of a bucket says, for a size: it names an axis of what the node reads."""
    now, high = (w.nodes[region.nodes[at]] for w in (streams.now, streams.high))
    pairs = [(use.geometry.size, own.geometry.size) for use, own in zip(high.uses, now.uses, strict=True)]
    other = {str(a): str(b) for whole, own in pairs for a, b in zip(whole, own, strict=True) if a != b}
    return re.sub(r"(?<=with size )\d+", lambda found: other.get(found.group(), found.group()), message)


class _Call:
    """The executable of a bucket, called for a size. Values that vary come back as tensors of their own."""

    def __init__(self, streams: Streams, region: Region, made: Executable):
        now, high = streams.now.homes, streams.high.homes
        self.size, self.call, self.device = streams.size, made.call, streams.high.device
        self.outputs = [now[v] if now[v] != high[v] else None for v in region.outputs]
        self.ints: Any = None  # what it was called with, and the same with the size, over this memory
        self.numbers: Any = None
        self.memory: list[np.ndarray] = []
        self.inputs: list[_Front | None] = []
        for at, v in enumerate(region.inputs):
            varies, may_stay = now[v] != high[v], at not in region.donated
            self.inputs.append(_Front(_room(made, at, high[v], may_stay, self.device), now[v]) if varies else None)

    def __call__(self, *arrays: jax.Array | torch.Tensor) -> tuple[list[jax.Array | torch.Tensor], jax.Array]:
        *values, floats, ints = arrays
        given = [x if front is None else front.enlarged(x) for x, front in zip(values, self.inputs, strict=True)]
        if self.ints is not ints:
            memory: list[np.ndarray] = []
            numbers = self.device.numbers([*np.asarray(ints).tolist()[: ints.size], self.size], torch.int64, memory)
            self.ints, self.numbers, self.memory = ints, numbers, memory
        made, flags = self.call(*given, floats, self.numbers)
        try:
            return [x if home is None else _cut(x, home) for x, home in zip(made, self.outputs, strict=True)], flags
        finally:
            flags.block_until_ready()  # what is padded is not needed any more


class _Room:
    """Memory for the largest value of a bucket, as a tensor and as an array: kept from call to call if it is little."""

    __slots__ = ("array", "device", "home", "is_kept", "tensor")

    def __init__(self, home: Home, is_kept: bool, device: Device):
        self.home, self.is_kept, self.device = home, is_kept, device
        self.tensor: torch.Tensor | None = None
        self.array: Any = None

    def put(self, x: torch.Tensor) -> jax.Array:
        """A value in front of the memory. What lies behind it reaches no result."""
        largest = torch.empty(self.home[1], dtype=self.home[0])
        largest.as_strided(x.shape, largest.stride()).copy_(x)
        array = self.device.put(largest)
        if self.is_kept and array.unsafe_buffer_pointer() == pointer_of(storage_of(largest)):  # else it is a copy
            self.tensor, self.array = largest, array
        return array


def _room(of: Executable, at: int, home: Home, may_stay: bool, device: Device) -> _Room:
    """That of an argument of a bucket's executable, for all sizes: the runtime's lock is held during a call. What is
    donated cannot stay."""
    rooms = _ROOMS.setdefault(of, {})
    if at not in rooms:
        kept = sum(nbytes_of(room.home) for room in rooms.values() if room.is_kept)
        rooms[at] = _Room(home, may_stay and kept + nbytes_of(home) <= KEPT, device)
    return rooms[at]


_ROOMS: WeakKeyDictionary[Executable, dict[int, _Room]] = WeakKeyDictionary()


class _Front:
    """The values of one size, to be put in front of the memory of the largest."""

    __slots__ = ("room", "shape", "view")

    def __init__(self, room: _Room, home: Home):
        self.room, self.shape = room, home[1]
        self.view: torch.Tensor | None = None

    def enlarged(self, value: jax.Array | torch.Tensor) -> jax.Array:
        """A value of the size as one of the largest."""
        room, view = self.room, self.view
        x = value if isinstance(value, torch.Tensor) else to_tensor(value)
        if room.tensor is None:
            return room.put(x)
        if view is None:
            view = self.view = room.tensor.as_strided(self.shape, room.tensor.stride())
        view.copy_(x)
        return room.array


def _cut(x: jax.Array, home: Home) -> torch.Tensor:
    """The front of a value."""
    largest = to_tensor(x)
    return torch.empty(home[1], dtype=home[0]).copy_(largest.as_strided(home[1], largest.stride()))


# ---- one stream at several sizes ---------------------------------------------------------------------------------


def _check(s: Streams) -> None:
    """See that a stream is, at each size, the same one.

    Raises:
        Refused: it is not.
    """
    works = (s.now, s.high, s.low, s.middle)
    sizes = (s.size, *s.bucket)
    if any(w.live != s.now.live or w.homes.keys() != s.now.homes.keys() for w in works):
        raise Refused("its values are not the same ones at each size")
    lines = _Lines(sizes)
    for vid in s.now.homes:
        lines.see([w.homes[vid] for w in works])
    for nodes in zip(*(w.nodes for w in works), strict=all(len(w.nodes) == len(s.now.nodes) for w in works)):
        if len({n.op for n in nodes}) > 1 or len({n.twin for n in nodes}) > 1:
            raise Refused("its ops are not the same ones at each size")
        if len({n.signature[0] for n in nodes}) > 1:  # type: ignore[index]
            lines.see([[list(map(type, n.scalars)), n.targets, n.args, n.kwargs] for n in nodes])
        if any(n.uses != nodes[0].uses for n in nodes):
            lines.see([[tuple(u) for u in n.uses] for n in nodes])
        lines.see([[(*r[:1], r.home, r.geometry, r.base, r.spec.shape, r.spec.strides, r.spec.dtype) for r in n.results]
                   for n in nodes])  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Lines:
    """Values at these sizes have to be the same, or whole numbers of which the first is on the parabola through the
    others: strides are products of two sizes. (Sizes themselves have to be linear, as is seen from what is traced.)"""

    sizes: tuple[int, int, int, int]

    def see(self, found: Sequence[Any]) -> None:
        first = found[0]
        if any(type(x) is not type(first) for x in found):
            raise Refused("an argument is of another type at another size")
        if isinstance(first, (list, tuple)):
            if any(len(x) != len(first) for x in found):
                raise Refused("an argument is longer at another size")
            for parts in zip(*found, strict=True):
                self.see(parts)
        elif isinstance(first, dict):
            if any(x.keys() != first.keys() for x in found):
                raise Refused("an argument is only there at another size")
            for name in first:
                self.see([x[name] for x in found])
        elif isinstance(first, slice):
            self.see([(x.start, x.stop, x.step) for x in found])
        elif type(first) is int:
            self._line(found)
        elif not all(_is_same(x, first) for x in found):
            raise Refused("an argument is another one at another size")

    def _line(self, found: Sequence[int]) -> None:
        (size, *ends), (now, *values) = self.sizes, found
        if now == values[0] == values[1] == values[2]:
            return
        there = Fraction(0)
        for k, value in enumerate(values):
            others = [x for i, x in enumerate(ends) if i != k]
            there += value * Fraction(math.prod(size - x for x in others), math.prod(ends[k] - x for x in others))
        if there != now:
            raise Refused("an argument is another one than its size says")


def _is_same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b)
