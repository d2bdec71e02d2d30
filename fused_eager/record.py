"""Recording: an ATen call becomes a node of the stream, and its outputs become pending tensors.

In-place ops, `out=` and writes through views are functionalised at the level of storages: a read is a view of the
storage's current value, a write makes a new value of the whole storage.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from fused_eager.fusion_rules.lowering import leaves, map_leaves

from . import buffers, native, run, site
from .buffers import TABLE, Buffer, Home, storage_of
from .calls import CALLS, Call, Foreign, Output, View, new_call, take
from .infer import Fresh, Same, Unknown
from .opinfo import OpInfo
from .reasons import Reason
from .stream import DeviceInput, NativeInput, Node, Result, Stream, Use
from .trap import offset_of

Tensor = torch.Tensor


def _position(stream: Stream, t: Tensor, view: View) -> tuple[int, int, bool]:
    """The value that a tensor's storage holds now (an input, if need be), the offset in it, and whether it moves.

    A gapless part of a value may begin elsewhere in the next round (`x[i]`): its offset is then a number like others.
    """
    storage = storage_of(t)
    buffer = TABLE.get(storage._cdata)
    if buffer is None:
        return _native_input(stream, storage, view.block, offset_of(t) * view.itemsize), 0, False
    vid = buffer.vid if buffer.stream is stream else _current(stream, buffer)
    return vid, offset_of(t), 0 <= view.covered < storage.nbytes()


def _current(stream: Stream, buffer: Buffer) -> int:
    """The number of a buffer's current value in this stream."""
    if buffer.stream is stream:
        return buffer.vid
    if buffer.stream is not None:
        run.flush(buffer.stream, Reason("sync.thread"))
    if buffer.error is not None:
        raise run.lost(buffer)
    found = stream.reads.get(buffer.cdata)
    if found is None or found.array is not buffer.array:
        assert buffer.array is not None and buffer.home is not None
        found = DeviceInput(stream.new_vid(), buffer.home, buffer, buffer.array, buffer.origin)
        stream.inputs.append(found)
        stream.reads[buffer.cdata] = found
    return found.vid


def _native_input(stream: Stream, storage: torch.UntypedStorage, home: Home, offset: int) -> int:
    known = stream.natives.get(storage._cdata)
    key = (home, offset)
    found = None if known is None else known.get(key)
    if found is not None:
        return found.vid
    if storage.nbytes() and not storage.data_ptr():
        raise Foreign("a tensor has no memory (a zero tensor of forward-mode differentiation)")
    found = NativeInput(stream.new_vid(), home, storage, offset)
    if native.is_volatile(storage):
        # Others write this memory (NumPy, another process): what counts is what it holds now, at each read.
        native.snapshot(found)
    else:
        stream.natives.setdefault(storage._cdata, {})[key] = found
    stream.inputs.append(found)
    return found.vid


def _write(stream: Stream, t: Tensor, view: View, undo: list[tuple[Buffer, tuple[Any, ...]]]) -> Result:
    """A new value for a tensor's storage, to be produced by the node that is being recorded."""
    storage = storage_of(t)
    buffer = TABLE.get(storage._cdata)
    offset = offset_of(t)
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
        native.hand_over(storage)
        buffer = buffers.open_buffer(storage, born_native=True)
    elif buffer.stream is not stream and buffer.stream is not None:
        run.flush(buffer.stream, Reason("sync.thread"))
    undo.append((buffer, _state(stream, buffer)))
    vid = stream.new_vid()
    _make_pending(stream, buffer, vid, home)
    return Result(vid, home, g, base, view.spec)


# In-place ops that do not look at what they overwrite.
_OVERWRITERS = frozenset({"aten::copy_", "aten::zero_", "aten::fill_"})


def _forgive(info: OpInfo, t: Tensor, view: View) -> None:
    """A tensor whose value was lost may be overwritten: it then has one again."""
    b = TABLE.get(storage_of(t)._cdata)
    if b is None or b.error is None or b.storage.nbytes() != view.covered:
        return
    if info.op._schema.name in _OVERWRITERS or any(a.is_out for a in info.op._schema.arguments):
        buffers.release(b)


def _make_pending(stream: Stream, buffer: Buffer, vid: int, home: Home) -> None:
    buffer.stream, buffer.epoch, buffer.vid, buffer.home = stream, stream.epoch, vid, home
    if buffer.array is not None:
        buffer.previous, buffer.array = buffer.array, None
    buffer.error = None
    stream.pending[buffer.cdata] = buffer


def _new_tensor(stream: Stream, output: Output, undo: list[tuple[Buffer, tuple[Any, ...]]]) -> tuple[Tensor, Result]:
    """A pending tensor, and the result that will give it its value."""
    spec, geometry, home = output
    t = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    buffer = buffers.open_buffer(storage_of(t), born_native=False)
    undo.append((buffer, _state(stream, buffer)))
    vid = stream.new_vid()
    _make_pending(stream, buffer, vid, home)
    return t, Result(vid, home, geometry, None, spec)


def record(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record one call and return its outputs; or, where that cannot be, run it natively now."""
    parts: list[Any] = [info.number, torch.get_default_dtype()]
    tensors: list[Tensor] = []
    scalars: list[Any] = []
    hoisted = info.hoisted
    try:
        for i, a in enumerate(args):
            take(a, i in hoisted, parts, tensors, scalars)
        if kwargs:
            for name in sorted(kwargs):
                parts.append(name)
                take(kwargs[name], info.names.index(name) in hoisted, parts, tensors, scalars)
        key = tuple(parts)
        call = CALLS.get(key)
        if call is None:
            call = new_call(info, key, tensors, args, kwargs)
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
    if written and _may_overlap(tensors, written):
        return native.run_now(stream, info, args, kwargs, "it reads memory that it writes")
    if written and (call.overlapping or any(native.must_stay(storage_of(tensors[i])) for i in written)):
        return native.run_now(stream, info, args, kwargs, "it writes memory that others see, or that overlaps itself")
    if info.island and stream.config.islands != "allow":
        native.judge_island(stream.config, info, info.island)
    if call.doubt and call.structure not in TRUSTED:
        return _first_time(stream, info, call, key, args, kwargs)
    undo: list[tuple[Buffer, tuple[Any, ...]]] = []
    try:
        return _append(stream, info, call, tensors, scalars, undo)
    except Foreign as error:
        for buffer, state in reversed(undo):
            _restore(stream, buffer, state)
        return native.run_now(stream, info, args, kwargs, str(error))
    except BaseException:
        # Ctrl-C, or the value of an operand is lost: as if the op had not been called.
        for buffer, state in reversed(undo):
            _restore(stream, buffer, state)
        raise


def _may_overlap(tensors: list[Tensor], written: tuple[int, ...]) -> bool:
    """Whether a written tensor shares memory with another operand that is not the same view: ATen has a say in that."""
    if len(tensors) == 1:
        return False
    storages = [storage_of(t)._cdata for t in tensors]
    for i in written:
        if storages.count(storages[i]) > 1:
            if len(written) > 1:
                return True  # ATen goes through a list one by one, so each element sees what came before
            t = tensors[i]
            if any(s == storages[i] and not _same_view(t, u) for s, u in zip(storages, tensors, strict=True)):
                return True
    return False


def _same_view(t: Tensor, u: Tensor) -> bool:
    return t.shape == u.shape and t.stride() == u.stride() and offset_of(t) == offset_of(u)


# Doubtful calls whose real outputs have been seen to be what shape inference promised.
TRUSTED: set[int] = set()


def _first_time(stream: Stream, info: OpInfo, call: Call, key: Hashable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a doubtful call at once through ATen, which raises what eager raises, and see what it returns.

    If that is what shape inference promised, the next such call is deferred.
    """
    out = native.run_now(stream, info, args, kwargs, call.doubt)
    written = {id(t) for t in leaves([args, kwargs]) if isinstance(t, Tensor)}
    real = [t for t in leaves([out]) if isinstance(t, Tensor) and id(t) not in written]
    promised = [output.spec for output in call.outputs]
    if [(tuple(t.shape), t.dtype, t.stride()) for t in real] == [(s.shape, s.dtype, s.strides) for s in promised]:
        TRUSTED.add(call.structure)
    else:
        CALLS[key] = Unknown(f"{call.doubt}, and returns other tensors than it promises")
    return out


def _state(stream: Stream, b: Buffer) -> tuple[Any, ...]:
    return b.stream, b.epoch, b.vid, b.home, b.array, b.previous, b.error


def _restore(stream: Stream, b: Buffer, state: tuple[Any, ...]) -> None:
    """Take back what `_make_pending` did."""
    b.stream, b.epoch, b.vid, b.home, b.array, b.previous, b.error = state
    if b.stream is None:
        stream.pending.pop(b.cdata, None)
        if b.array is None and b.error is None:
            buffers.release(b)


def _append(
    stream: Stream,
    info: OpInfo,
    call: Call,
    tensors: list[Tensor],
    scalars: list[Any],
    undo: list[tuple[Buffer, tuple[Any, ...]]],
) -> Any:
    uses: list[Use] = []
    signature: list[Any] = [call.structure]
    for i in call.written:
        _forgive(info, tensors[i], call.views[i])
    for t, view in zip(tensors, call.views, strict=True):
        vid, offset, moves = _position(stream, t, view)
        geometry = view.geometry
        if moves:
            uses.append(Use(vid, geometry, len(scalars), view.covered // view.itemsize))
            scalars.append(offset)
            offset = -1
        else:
            uses.append(Use(vid, geometry if offset == 0 else geometry._replace(offset=offset)))
        signature += (vid, offset)
    fresh: list[Tensor] = []
    results: list[Result] = []
    for output in call.outputs:
        t, result = _new_tensor(stream, output, undo)
        fresh.append(t)
        results.append(result)
    for i in call.written:
        result = _write(stream, tensors[i], call.views[i], undo)
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
