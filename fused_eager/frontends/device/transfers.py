"""Transfers: values put on a device and fetched from it, and ops that ATen runs on what was fetched (islands)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.geometry import home_shape, is_dense
from fused_eager.fusion_rules.lowering import leaves, map_leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec, contiguous_strides

from ...devices.accelerator import moved, shaped
from ...devices.arrivals import await_values
from ...devices.buffer import LOCK
from ...devices.device import SEEN_AS
from ...devices.home import home_of, nbytes_of
from ...devices.storage import storage_of
from ...executing.island import tell
from ...log import site
from ...log.events import LOG
from ...log.reasons import Reason
from ...quiet import as_eager, through
from ...recording.record import NotRecorded
from ...tracing.opinfo import Kind, OpInfo, info_of
from .doors import DOORS, Door, is_on_device
from .queues import begin_before_a_copy

Tensor = torch.Tensor
aten = torch.ops.aten


def is_ours(value: Any) -> bool:
    """Whether a value is a tensor on one of the devices."""
    return isinstance(value, Tensor) and is_on_device(value)


def _dense(t: Tensor) -> tuple[Tensor, Spec]:
    """A tensor of the host's as its home, in memory of its own, and what it looks like from outside."""
    if t.is_conj() or t.is_neg() or not is_dense(tuple(t.shape), t.stride()):
        t = t.resolve_conj().resolve_neg().contiguous()
    spec = Spec(tuple(t.shape), t.dtype, t.stride(), SEEN_AS)
    return _storable(_home_of(t).clone()), spec


def _home_of(t: Tensor) -> Tensor:
    """A dense tensor as its storage has it."""
    shape = home_shape(Spec(tuple(t.shape), t.dtype, t.stride(), SEEN_AS))
    return t.as_strided(shape, contiguous_strides(shape))


def _storable(home: Tensor) -> Tensor:
    """The same bytes in a dtype that XLA has: what has none is kept all the same, and ATen computes with it."""
    return home if home.dtype in JAX_DTYPE else home.reshape(-1).view(torch.uint8)


def to_device(door: Door, t: Tensor) -> Tensor:
    """A copy of a tensor of the host's on a device."""
    with as_eager():
        home, spec = _dense(t)
    with LOCK:
        made, b = door.device.new(spec, home.nbytes)
        b.table[b.cdata] = b
        door.replace(b, home)  # type: ignore[arg-type]
    return made


def to_host(t: Tensor, reason: Reason) -> Tensor:
    """A tensor's value on the host, which nobody may write."""
    return DOORS[t.get_device()].value_of(t, reason)


def _fill(door: Door, t: Tensor, value: Tensor) -> None:
    """Write a tensor of the host's into one of the device's, of the same shape."""
    b = door.buffer_of(t)
    whole = t.numel() * t.itemsize == storage_of(t).nbytes() and not (t.is_conj() or t.is_neg())
    if whole and is_dense(tuple(t.shape), t.stride()):
        with as_eager():
            laid = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(value)
        door.replace(b, _storable(_home_of(laid)))
        return
    with as_eager():
        value = value.to(t.dtype)
    recorded(door, _COPY, (t, to_device(door, value)), {})


def of_array(door: Door, array: Any) -> Tensor:
    """A tensor on a device, of an array there that nobody else has. The caller holds the lock."""
    dtype, shape = home_of(array)
    spec = Spec(shape, dtype, contiguous_strides(shape), SEEN_AS)
    home = dtype, home_shape(spec)
    made, b = door.device.new(spec, nbytes_of(home))
    b.table[b.cdata] = b
    door.forget(b, home)  # type: ignore[arg-type]
    b.array = shaped(array, home[1])
    return made


def copied(t: Tensor, reason: Reason) -> tuple[Tensor, Any]:
    """A contiguous copy of a tensor on its device, as it is seen, which is nobody else's; and its array, of its shape,
    which may still be running. Raises as `array_of`."""
    with torch.no_grad():
        own = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    door = DOORS[t.get_device()]
    with LOCK:
        return own, shaped(door.array_of(door.buffer_of(own), reason), own.shape)


def goes_between(t: Tensor) -> bool:
    """Whether a tensor can be brought to another device without the host."""
    return t.layout is torch.strided and t.dtype in JAX_DTYPE and t.numel() > 0


def brought(door: Door, t: Tensor) -> Tensor:
    """A contiguous copy on a device of a tensor that is on another one, which does not go through the host."""
    array = copied(t, _BETWEEN)[1]
    with LOCK:
        return of_array(door, moved(array, door.device.xla))


_BETWEEN = Reason("sync.value", "a copy to another device")
DIFFER = (
    "Expected all tensors to be on the same device, but found at least two devices, {}! (when checking the arguments "
    "of {})"
)
_COPY = info_of(aten.copy_.default)


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_` between a device and the host, or two devices."""
    await_values([self, src])
    if not is_ours(self):
        self.copy_(to_host(src, Reason("sync.value", "aten.copy_.default")))
        return self
    door = DOORS[self.get_device()]
    if is_ours(src) and src.get_device() == self.get_device():
        if self.dtype is src.dtype is torch.uint8 and _copied_as_it_is(door, self, src):
            return self
        return recorded(door, _COPY, (self, src), {})  # type: ignore[no-any-return]
    if src.shape != self.shape:
        torch.empty(self.shape, device="meta").copy_(src.to("meta"))  # raises, as eager, if it does not fit
    begin_before_a_copy(door)
    if is_ours(src) and goes_between(src):
        return recorded(door, _COPY, (self, brought(door, src)), {})  # type: ignore[no-any-return]
    value = to_host(src, Reason("sync.value", "aten.copy_.default")) if is_ours(src) else src
    _fill(door, self, value.expand(self.shape))
    return self


def _copied_as_it_is(door: Door, self: Tensor, src: Tensor) -> bool:
    """Copy all bytes of a storage (as a deep copy does) as the numbers that they are: see `storages.seen_as`."""
    to, of = storage_of(self), storage_of(src)
    home = door.buffer_of(src).home
    whole = self.numel() == src.numel() == to.nbytes() == of.nbytes() and self.is_contiguous() and src.is_contiguous()
    if not whole or home is None or home[0] is torch.uint8:
        return False
    dtype, shape = home
    target, value = (
        torch.empty(0, dtype=dtype, device=self.device).set_(s, 0, shape, contiguous_strides(shape)) for s in (to, of)
    )
    recorded(door, _COPY, (target, value), {})
    return True


def recorded(door: Door, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an op; have ATen run it where it cannot be. Raises as `island` does."""
    await_values([args, kwargs])
    try:
        with LOCK:
            return door.compute(info, args, kwargs)
    except NotRecorded as error:
        why = str(error)
    if not torch._C._should_allow_numbers_as_tensors(info.op._schema.name.removeprefix("aten::")):
        # Python may not call such an op with a number.
        as_tensors = numbers_as_tensors(info.op, args, lambda number: to_device(door, torch.tensor(number)))
        if any(made is not given for made, given in zip(as_tensors, args, strict=True)):
            return recorded(door, info, as_tensors, kwargs)
    return island(door, info, args, kwargs, why)


def numbers_as_tensors(op: OpOverload, args: Any, make: Callable[[Any], Tensor] = torch.tensor) -> list[Any]:
    """An op's arguments, with what `make` makes of each number in place of a tensor: so C++ may call an op
    (`eq.Tensor`), and the number arrives as Python's."""
    return [
        make(a) if wants and isinstance(a, (bool, int, float, complex)) else a
        for wants, a in zip(_wants_tensors(op), args, strict=False)
    ]


@functools.cache
def _wants_tensors(op: OpOverload) -> tuple[bool, ...]:
    return tuple([isinstance(a.type, torch.TensorType) for a in op._schema.arguments])


def island(door: Door, info: OpInfo, args: Any, kwargs: dict[str, Any], why: str) -> Any:
    """Have ATen run an op on fetched values, and put what it returns and writes on the device.

    Raises:
        IslandRefused: the options refuse it.
        Exception: whatever eager raises.
    """
    found = {f"{t.device}" for t in leaves([args, kwargs]) if is_ours(t)}
    if len(found) > 1:
        raise RuntimeError(DIFFER.format(" and ".join(sorted(found)), info.op))
    reads = info.kind is Kind.VALUES or info.kind is Kind.CHECK
    if not reads:
        tell(door.stream.config, info.op, site.here(), why)
    text = f"{info.op}: {why}" if why else str(info.op)
    reason = Reason("sync.value" if reads else "sync.island", text, site.describe(site.here()))
    given = [*args, *(kwargs.get(n) for n in info.names[len(args) :])]
    targets = [t for i in info.written if i < len(given) for t in leaves([given[i]]) if isinstance(t, Tensor)]
    written = [t for t in targets if is_ours(t)]
    if found and len(written) < len(targets):
        found.update(f"{t.device}" for t in targets)
        raise RuntimeError(DIFFER.format(" and ".join(sorted(found, reverse=True)), info.op))
    homes: dict[int, Tensor] = {}  # of the storages that are written, by address
    twins: dict[int, tuple[Tensor, Tensor]] = {}  # of the program's tensors: those that ATen sees
    with LOCK:
        for t in written:
            b = DOORS[t.get_device()].buffer_of(t)
            if b.cdata not in homes:
                of = DOORS[t.get_device()]
                homes[b.cdata] = of.device.fetch(of.array_of(b, reason)).clone()

    def enter(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == torch._C._get_privateuse1_backend_name():
            return SEEN_AS
        if not is_ours(leaf):
            return leaf
        if id(leaf) not in twins:
            of = DOORS[leaf.get_device()]
            home = homes.get(storage_of(leaf)._cdata)
            twins[id(leaf)] = leaf, of.value_of(leaf, reason) if home is None else of.view_of(leaf, home)
        return twins[id(leaf)][1]

    with as_eager():
        fetched, named = [map_leaves(enter, a) for a in args], {k: map_leaves(enter, v) for k, v in kwargs.items()}
        out = through(info.op, fetched, named)
    for t in written:
        _take_back(t, twins[id(t)][1], homes)
    back = {id(twin): t for t, twin in twins.values()}

    def leave(leaf: Any) -> Any:
        if id(leaf) in back:
            return back[id(leaf)]
        if not isinstance(leaf, Tensor) or leaf.device != SEEN_AS:
            return leaf
        if leaf.layout is torch.sparse_coo or leaf.is_nested:
            return leaf.to(torch.device(door.device.name))
        if leaf.layout is not torch.strided or leaf.is_quantized:
            kind = "quantized" if leaf.is_quantized else f"{leaf.layout}".removeprefix("torch.").removeprefix("_")
            raise NotImplementedError(
                f"{info.op} returns a tensor of the kind {kind!r}, of which {door.device.name} has none: call it on "
                "the CPU, with t.cpu()"
            )
        return to_device(door, leaf)

    return map_leaves(leave, out)


def _take_back(t: Tensor, twin: Tensor, homes: dict[int, Tensor]) -> None:
    """Give a tensor what has been written into its twin."""
    door = DOORS[t.get_device()]
    if tuple(twin.shape) != tuple(t.shape):  # an `out=` that ATen has resized
        t.resize_(twin.shape)
        _fill(door, t, twin)
        return
    b = door.buffer_of(t)
    home = homes.pop(b.cdata, None)
    if home is not None:
        door.replace(b, home)


def read_number(t: Tensor) -> Any:
    """The number in a tensor of one element."""
    LOG.count("sync aten._local_scalar_dense.default")
    return aten._local_scalar_dense.default(to_host(t, Reason("sync.value", "aten._local_scalar_dense.default")))
