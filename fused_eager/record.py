"""Recording: an ATen call becomes a node of the stream, and its outputs become pending tensors.

In-place ops, `out=` and writes through views are functionalised at the level of storages: a read is a view of the
storage's current value, a write makes a new value of the whole storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from fused_eager.fusion_rules.geometry import Geometry, home_shape, is_dense, overlaps_itself
from fused_eager.fusion_rules.lowering import leaves, map_leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec

from . import buffers, native, run, site
from .bounded import Bounded
from .buffers import TABLE, Buffer, Home, storage_of
from .infer import Fresh, Same, Unknown, infer
from .opinfo import HIDDEN_WRITES, OpInfo
from .reasons import Reason
from .stream import DeviceInput, Hole, NativeInput, Node, Ref, Result, Stream, Use

Tensor = torch.Tensor
STRIDED = torch.strided
TINY = 1  # elements; such work is done by ATen before XLA would have been asked
_INT64 = range(-(2**63), 2**63)


class View(NamedTuple):
    """How a tensor argument of given size, strides and dtype is seen: `geometry` at offset 0, and the block it touches.

    `block` is the home of native memory read through it, and of a value that it overwrites whole; `covered` are the
    bytes of the storage that it then has to have (-1: it has gaps, so it never overwrites all).
    """

    geometry: Geometry
    block: Home
    itemsize: int
    covered: int
    spec: Spec


class Output(NamedTuple):
    """A new output: what to allocate, and the value that will fill it."""

    spec: Spec
    geometry: Geometry
    home: Home


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about a call that its structure decides: remembered per (op, structural arguments, tensor specs)."""

    template: Any  # what is returned, with Fresh and Same leaves
    args: Any  # templates with Ref and Hole leaves
    kwargs: dict[str, Any]
    views: tuple[View, ...]
    outputs: tuple[Output, ...]
    written: tuple[int, ...]  # positions among the tensor arguments, in schema order
    overlapping: bool  # a written tensor overlaps itself
    alias: bool
    tiny: bool
    structure: int  # a number that stands for the memo key in node signatures


CALLS: Bounded[Hashable, Call | Unknown] = Bounded(65_536)
_structures = itertools.count()


def _freeze(value: Any) -> Hashable:
    """A structural argument as a key. Floats by their bits: 0.0 and -0.0, 1 and 1.0 and True are different calls."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind is bool:
        return kind, value
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    return value


class Foreign(Exception):
    """An argument that is not an ordinary tensor on the host; the text says what it is."""


def _take(a: Any, hoist: bool, key: list[Any], tensors: list[Tensor], scalars: list[Any]) -> None:
    """Take one argument apart: tensors, hoisted numbers, and the hashable rest."""
    kind = type(a)
    if kind is Tensor or kind is Parameter or isinstance(a, Tensor):
        if not a.is_cpu or a.layout is not STRIDED:
            raise Foreign(f"a tensor is {a.layout} on {a.device}")
        tensors.append(a)
        key += (a.shape, a.stride(), a.dtype)
        if a.is_neg() or a.is_conj():
            key.append((a.is_neg(), a.is_conj()))
    elif hoist and (kind is float or (kind is int and a in _INT64)):
        scalars.append(a)
        key.append(kind)
    elif kind is list or kind is tuple:
        key.append(len(a))
        for x in a:
            _take(x, hoist, key, tensors, scalars)
    else:
        key.append(a if kind is int or a is None else _freeze(a))


def _templates(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with `Ref` for tensors and `Hole` for hoisted numbers, numbered as `_take` takes them."""
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


def _view(t: Tensor) -> View:
    """A view of native memory becomes an input that is just the block it touches, from its first element on.

    So `x[i:i+4]` gives the same region for every i: the offset is an address, not part of the computation.
    """
    size, stride, dtype = tuple(t.shape), t.stride(), t.dtype
    spec = Spec(size, dtype, stride, t.device)
    dense = is_dense(size, stride)
    if dense:
        block = home_shape(spec)
    else:
        block = (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0,)
    geometry = Geometry(size, stride, 0, dtype, dtype.is_complex and t.is_conj(), t.is_neg())
    return View(geometry, (dtype, block), dtype.itemsize, spec.nbytes if dense else -1, spec)


def _output(spec: Spec) -> Output:
    home: Home = (spec.dtype, home_shape(spec))
    if not is_dense(spec.shape, spec.strides):
        reach = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True)) if spec.numel else 0
        home = (spec.dtype, (reach,))
    return Output(spec, Geometry(spec.shape, spec.strides, 0, spec.dtype), home)


def _call(info: OpInfo, key: Hashable, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Call | Unknown:
    unfit = [t.dtype for t in tensors if t.dtype not in JAX_DTYPE]
    inferred = Unknown(f"XLA has no {unfit[0]}") if unfit else infer(info.op, args, kwargs, tensors)
    if isinstance(inferred, Unknown):
        CALLS[key] = inferred
        return inferred
    written = _written(info, args, kwargs)
    done, named = _templates(info, args, kwargs)
    call = Call(
        inferred.template,
        done,
        named,
        tuple(_view(t) for t in tensors),
        tuple(_output(s) for s in inferred.fresh),
        written,
        any(overlaps_itself(tuple(tensors[i].shape), tensors[i].stride()) for i in written),
        inferred.alias,
        all(t.numel() <= TINY for t in tensors) and all(s.numel <= TINY for s in inferred.fresh),
        next(_structures),
    )
    CALLS[key] = call
    return call


def _position(stream: Stream, t: Tensor, view: View) -> tuple[int, int]:
    """The number of the value that a tensor's storage holds now (an input, if need be), and the offset in it."""
    storage = storage_of(t)
    buffer = TABLE.get(storage._cdata)
    if buffer is None:
        return _native_input(stream, storage, view.block, t.storage_offset() * view.itemsize), 0
    return (buffer.vid if buffer.stream is stream else _current(stream, buffer)), t.storage_offset()


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
        stream.inputs.append(DeviceInput(buffer.vid, buffer.home, buffer.cdata, buffer.array, buffer.origin))
        # Registered as touched, not as pending: `stream` stays None until something writes it.
        stream.pending[buffer.cdata] = buffer
    return buffer.vid


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


def _write(stream: Stream, t: Tensor, view: View) -> Result:
    """A new value for a tensor's storage, to be produced by the node that is being recorded."""
    storage = storage_of(t)
    buffer = TABLE.get(storage._cdata)
    offset = t.storage_offset()
    g = view.geometry if offset == 0 else view.geometry._replace(offset=offset)
    base, home = None, view.block
    if offset or storage.nbytes() != view.covered:
        if buffer is None:
            home = (g.dtype, (storage.nbytes() // view.itemsize,))
            base = _native_input(stream, storage, home, 0)
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
    return Result(vid, home, g, base, view.spec)


def _make_pending(stream: Stream, buffer: Buffer, vid: int, home: Home) -> None:
    buffer.stream, buffer.epoch, buffer.vid, buffer.home = stream, stream.epoch, vid, home
    if buffer.array is not None:
        buffer.previous, buffer.array = buffer.array, None
    buffer.error = None
    stream.pending[buffer.cdata] = buffer


def _new_tensor(stream: Stream, output: Output) -> tuple[Tensor, Result]:
    """A pending tensor, and the result that will give it its value."""
    spec, geometry, home = output
    t = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    buffer = buffers.open_buffer(storage_of(t), born_native=False)
    vid = stream.new_vid()
    _make_pending(stream, buffer, vid, home)
    return t, Result(vid, home, geometry, None, spec)


def record(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record one call and return its outputs; or, where that cannot be, run it natively now."""
    parts: list[Any] = [info.number]
    tensors: list[Tensor] = []
    scalars: list[Any] = []
    hoisted = info.hoisted
    try:
        for i, a in enumerate(args):
            _take(a, i in hoisted, parts, tensors, scalars)
        if kwargs:
            for name in sorted(kwargs):
                parts.append(name)
                _take(kwargs[name], info.names.index(name) in hoisted, parts, tensors, scalars)
        key = tuple(parts)
        call = CALLS.get(key)
        if call is None:
            call = _call(info, key, tensors, args, kwargs)
    except (Foreign, TypeError) as error:  # TypeError: a structural argument that cannot be hashed
        call = Unknown(str(error))
    if type(call) is Unknown:
        return native.run_now(stream, info, args, kwargs, call.reason)
    assert isinstance(call, Call)
    if call.alias:
        return info.op(*args, **kwargs)
    written = call.written
    if call.tiny and all(storage_of(t)._cdata not in TABLE for t in tensors):
        return native.run_tiny(info, args, kwargs, [tensors[i] for i in written])
    if written and (call.overlapping or any(native.must_stay(storage_of(tensors[i])) for i in written)):
        return native.run_now(stream, info, args, kwargs, "it writes memory that others see, or that overlaps itself")
    if info.island and call.structure not in TRUSTED:
        return _first_island(stream, info, call, key, args, kwargs)
    return _append(stream, info, call, tensors, scalars)


# Calls without a lowering whose real outputs have been seen to be what shape inference promised.
TRUSTED: set[int] = set()


def _first_island(stream: Stream, info: OpInfo, call: Call, key: Hashable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op that only ATen can run for the first time: at once, to see whether shape inference told the truth.

    If it did, the next such call is deferred. A few ops return something else on this machine than they promise.
    """
    out = native.run_now(stream, info, args, kwargs, info.island)
    written = {id(t) for t in leaves([args, kwargs]) if isinstance(t, Tensor)}
    real = [t for t in leaves([out]) if isinstance(t, Tensor) and id(t) not in written]
    promised = [output.spec for output in call.outputs]
    if [(tuple(t.shape), t.dtype) for t in real] == [(s.shape, s.dtype) for s in promised]:
        TRUSTED.add(call.structure)
    else:
        CALLS[key] = Unknown(f"{info.island}, and returns other shapes than it promises")
    return out


def _append(stream: Stream, info: OpInfo, call: Call, tensors: list[Tensor], scalars: list[Any]) -> Any:
    uses: list[Use] = []
    signature: list[Any] = [call.structure]
    for t, view in zip(tensors, call.views, strict=True):
        vid, offset = _position(stream, t, view)
        signature += (vid, offset)
        geometry = view.geometry
        uses.append(Use(vid, geometry if offset == 0 else geometry._replace(offset=offset)))
    fresh: list[Tensor] = []
    results: list[Result] = []
    for output in call.outputs:
        t, result = _new_tensor(stream, output)
        fresh.append(t)
        results.append(result)
    for i in call.written:
        result = _write(stream, tensors[i], call.views[i])
        signature.append((result.base, result.home, result.geometry.offset))
        results.append(result)
    stream.nodes.append(
        Node(
            info.number,
            info.op,
            info.twin,
            call.args,
            call.kwargs,
            tuple(uses),
            scalars,
            tuple(results),
            call.written,
            tuple(signature),
            site.here(),
        )
    )
    template = call.template
    if type(template) is Fresh:
        return fresh[0]
    if type(template) is Same:
        return tensors[template.index]

    def leave(leaf: Any) -> Any:
        if isinstance(leaf, Fresh):
            return fresh[leaf.index]
        return tensors[leaf.index] if isinstance(leaf, Same) else leaf

    return map_leaves(leave, template)
