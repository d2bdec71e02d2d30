"""Recording: an ATen call becomes a node of the stream, and its outputs become pending tensors.

In-place ops, `out=` and writes through views are functionalised at the level of storages: a read is a view of the
storage's current value, a write makes a new value of the whole storage.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from fused_eager.fusion_rules.geometry import Geometry, home_shape, is_dense, overlaps_itself
from fused_eager.fusion_rules.lowering import leaves, map_leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec

from . import buffers, native, run, site
from .buffers import TABLE, Buffer, Home, storage_of
from .infer import Fresh, Inferred, Same, Unknown, infer
from .opinfo import HIDDEN_WRITES, OpInfo
from .reasons import Reason
from .stream import DeviceInput, Hole, NativeInput, Node, Ref, Result, Stream, Use

Tensor = torch.Tensor
STRIDED = torch.strided
TINY = 1  # elements; such work is done by ATen before XLA would have been asked
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about a call that its structure decides: remembered per (op, structural arguments, tensor specs)."""

    inferred: Inferred
    args: Any  # templates with Ref and Hole leaves
    kwargs: dict[str, Any]
    written: tuple[int, ...]  # positions among the tensor arguments, in schema order
    tiny: bool
    structure: int  # a number that stands for the memo key in node signatures


CALLS: dict[Hashable, Call | Unknown] = {}


def _freeze(value: Any) -> Hashable:
    """A structural argument as a key. Floats by their bits: 0.0 and -0.0, 1 and 1.0 and True are different calls."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind is bool:
        return kind, value
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind is list or kind is tuple:
        return tuple([_freeze(v) for v in value])
    return value


class Parsed:
    """A call's arguments taken apart: tensors, hoisted numbers, and the hashable rest."""

    __slots__ = ("key", "scalars", "tensors")

    def __init__(self, info: OpInfo, args: Any, kwargs: dict[str, Any]):
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []
        self.scalars: list[float | int] = []
        hoisted = info.hoisted
        for i, a in enumerate(args):
            self._take(a, i in hoisted)
        if kwargs:
            names = info.names
            for name in sorted(kwargs):
                self.key.append(name)
                self._take(kwargs[name], names.index(name) in hoisted)

    def _take(self, a: Any, hoist: bool) -> None:
        kind = type(a)
        if isinstance(a, Tensor):
            self.tensors.append(a)
            self.key.append(Tensor)
        elif hoist and (kind is float or (kind is int and a in _INT64)):
            self.scalars.append(a)
            self.key.append(kind)
        elif kind is list or kind is tuple:
            self.key.append(len(a))
            for x in a:
                self._take(x, hoist)
        else:
            self.key.append(_freeze(a))


def _templates(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with `Ref` for tensors and `Hole` for hoisted numbers, numbered as `Parsed` numbers them."""
    refs = holes = 0

    def leaf(hoist: bool) -> Any:
        def take(a: Any) -> Any:
            nonlocal refs, holes
            kind = type(a)
            if isinstance(a, Tensor):
                refs += 1
                return Ref(refs - 1)
            if hoist and (kind is float or (kind is int and a in _INT64)):
                holes += 1
                return Hole(holes - 1, kind)
            return a

        return take

    done = [map_leaves(leaf(i in info.hoisted), a) for i, a in enumerate(args)]
    named = {n: map_leaves(leaf(info.names.index(n) in info.hoisted), kwargs[n]) for n in sorted(kwargs)}
    return done, named


def _written(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Which tensor arguments the call writes, as positions among its tensors."""
    hidden = HIDDEN_WRITES.get(str(info.op))
    if hidden is not None:
        flag = info.names.index(hidden[1])
        if not (args[flag] if flag < len(args) else kwargs.get(hidden[1], False)):
            return ()
    positions: dict[int, list[int]] = {}
    counter = 0
    for i, value in [*enumerate(args), *((info.names.index(n), kwargs[n]) for n in sorted(kwargs))]:
        count = sum(isinstance(leaf, Tensor) for leaf in leaves([value]))
        positions[i] = list(range(counter, counter + count))
        counter += count
    return tuple(p for i in info.written for p in positions.get(i, []))


def _call(info: OpInfo, key: Hashable, parsed: Parsed, args: Any, kwargs: dict[str, Any]) -> Call | Unknown:
    inferred = infer(info.op, args, kwargs, parsed.tensors)
    if isinstance(inferred, Unknown):
        CALLS[key] = inferred
        return inferred
    written = _written(info, args, kwargs)
    tiny = all(t.numel() <= TINY for t in parsed.tensors) and all(s.numel <= TINY for s in inferred.fresh)
    call = Call(inferred, *_templates(info, args, kwargs), written, tiny, len(CALLS))
    CALLS[key] = call
    return call


def read(stream: Stream, t: Tensor) -> Use:
    """The current value of a tensor's storage, seen through the tensor's geometry. Makes it an input if need be."""
    storage = storage_of(t)
    cdata = storage._cdata
    buffer = TABLE.get(cdata)
    if buffer is None:
        return _read_native(stream, t, storage)
    vid = _current(stream, buffer)
    size, stride, offset, dtype = t.shape, t.stride(), t.storage_offset(), t.dtype
    return Use(vid, Geometry(size, stride, offset, dtype, dtype.is_complex and t.is_conj(), t.is_neg()))


def _current(stream: Stream, buffer: Buffer) -> int:
    """The number of a buffer's current value in this stream."""
    if buffer.stream is stream:
        return buffer.vid
    if buffer.stream is not None:
        run.flush(buffer.stream, Reason("sync.thread"))
    if buffer.error is not None:
        raise run.lost(buffer)
    if buffer.epoch != stream.epoch or stream.pending.get(buffer.cdata) is not buffer:
        assert buffer.array is not None and buffer.home is not None
        buffer.vid = stream.new_vid()
        buffer.epoch = stream.epoch
        stream.inputs.append(DeviceInput(buffer.vid, buffer.home, buffer.array, buffer.origin))
        # Registered as touched, not as pending: `stream` stays None until something writes it.
        stream.pending[buffer.cdata] = buffer
    return buffer.vid


def _read_native(stream: Stream, t: Tensor, storage: torch.UntypedStorage) -> Use:
    """A view of native memory becomes an input that is just the block it touches, from its first element on.

    So `x[i:i+4]` gives the same region for every i: the offset is an address, not part of the computation.
    """
    size, stride, dtype = t.shape, t.stride(), t.dtype
    spec = Spec(tuple(size), dtype, stride, t.device)
    dense = is_dense(size, stride)
    reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0
    shape = home_shape(spec) if dense else (reach,)
    vid = _native_input(stream, storage, (dtype, shape), t.storage_offset() * dtype.itemsize)
    return Use(vid, Geometry(size, stride, 0, dtype, dtype.is_complex and t.is_conj(), t.is_neg()))


def _native_input(stream: Stream, storage: torch.UntypedStorage, home: Home, offset: int) -> int:
    known = stream.natives.setdefault(storage._cdata, {})
    key = (home, offset)
    found = known.get(key)
    if found is None:
        found = known[key] = NativeInput(stream.new_vid(), home, storage, offset)
        stream.inputs.append(found)
        if native.is_volatile(storage):
            # Others write this memory (NumPy, another process): what counts is what it holds now.
            native.snapshot(found)
    return found.vid


def write(stream: Stream, t: Tensor) -> Result:
    """A new value for a tensor's storage, to be produced by the node that is being recorded."""
    storage = storage_of(t)
    buffer = TABLE.get(storage._cdata)
    g = Geometry(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.dtype.is_complex and t.is_conj(), t.is_neg())
    spec = Spec(g.size, g.dtype, g.stride, t.device)
    covers = spec.nbytes == storage.nbytes() and g.offset == 0 and is_dense(g.size, g.stride)
    base = None
    home: Home = (g.dtype, home_shape(spec))
    if not covers:
        if buffer is None:
            n = storage.nbytes() // g.dtype.itemsize
            base, home = _native_input(stream, storage, (g.dtype, (n,)), 0), (g.dtype, (n,))
        else:
            base = _current(stream, buffer)
            assert buffer.home is not None
            home = buffer.home
    if buffer is None:
        native.hand_over(stream, storage)
        buffer = buffers.open_buffer(storage, born_native=True)
    elif buffer.stream is not stream and buffer.stream is not None:
        run.flush(buffer.stream, Reason("sync.thread"))
    vid = stream.new_vid()
    _make_pending(stream, buffer, vid, home)
    return Result(vid, home, g, base, spec)


def _make_pending(stream: Stream, buffer: Buffer, vid: int, home: Home) -> None:
    buffer.stream, buffer.epoch, buffer.vid, buffer.home = stream, stream.epoch, vid, home
    if buffer.array is not None:
        buffer.previous, buffer.array = buffer.array, None
    buffer.error = None
    stream.pending[buffer.cdata] = buffer


def new_tensor(stream: Stream, spec: Spec) -> tuple[Tensor, Result]:
    """A pending tensor of the given spec, and the result that will give it its value."""
    t = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=spec.device)
    storage = storage_of(t)
    buffer = buffers.open_buffer(storage, born_native=False)
    g = Geometry(spec.shape, spec.strides, 0, spec.dtype)
    home: Home = (spec.dtype, home_shape(spec))
    if not is_dense(spec.shape, spec.strides):
        home = (spec.dtype, (storage.nbytes() // spec.dtype.itemsize,))
    vid = stream.new_vid()
    _make_pending(stream, buffer, vid, home)
    return t, Result(vid, home, g, None, spec)


def record(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record one call and return its outputs; or, where that cannot be, run it natively now."""
    parsed = Parsed(info, args, kwargs)
    metas: list[Any] = []
    for t in parsed.tensors:
        if t.layout is not STRIDED or t.dtype not in JAX_DTYPE or t.device != native.HOST:
            return native.run_now(stream, info, args, kwargs, f"a tensor is {t.dtype}, {t.layout}, on {t.device}")
        metas.append((t.shape, t.stride(), t.dtype))
    key = (info.op, tuple(parsed.key), tuple(metas))
    call = CALLS.get(key)
    if call is None:
        try:
            call = _call(info, key, parsed, args, kwargs)
        except TypeError as error:  # an unhashable structural argument
            call = Unknown(str(error))
    if isinstance(call, Unknown):
        return native.run_now(stream, info, args, kwargs, call.reason)
    if call.inferred.alias:
        return info.op(*args, **kwargs)
    tensors = parsed.tensors
    if call.tiny and all(storage_of(t)._cdata not in TABLE for t in tensors):
        return native.run_tiny(stream, info, args, kwargs, [tensors[i] for i in call.written])
    for i in call.written:
        t = tensors[i]
        if overlaps_itself(tuple(t.shape), t.stride()) or native.must_stay(storage_of(t)):
            return native.run_now(stream, info, args, kwargs, "it writes memory that others see, or that overlaps")
    uses = tuple([read(stream, t) for t in tensors])
    outputs: list[Tensor] = []
    results: list[Result] = []
    for spec in call.inferred.fresh:
        t, result = new_tensor(stream, spec)
        outputs.append(t)
        results.append(result)
    for i in call.written:
        results.append(write(stream, tensors[i]))
    geometry = tuple([(r.geometry, r.base) for r in results[len(outputs) :]])
    node = Node(
        info.op, info.twin, call.args, call.kwargs, uses, parsed.scalars, tuple(results), call.written,
        (call.structure, uses, geometry), site.here(),
    )
    stream.nodes.append(node)

    def leave(leaf: Any) -> Any:
        if isinstance(leaf, Fresh):
            return outputs[leaf.index]
        return tensors[leaf.index] if isinstance(leaf, Same) else leaf

    template = call.inferred.template
    return outputs[0] if type(template) is Fresh else map_leaves(leave, template)
