"""Pending: how a stream gets hold of values, and how storages wait for theirs. What recording and following share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from fused_eager.fusion_rules.lowering import map_leaves

from ..devices.buffer import Buffer
from ..devices.home import Home
from ..devices.storage import offset_of, pointer_of, storage_of
from ..executing import run
from ..log.reasons import Reason
from ..tracing.calls import Foreign
from ..tracing.infer import Fresh, Same
from ..tracing.opinfo import OpInfo
from ..tracing.stream import DeviceInput, NativeInput, Stream
from ..tracing.structure import Output
from . import native

Tensor = torch.Tensor
State = tuple[Any, ...]
Undo = list[tuple[Buffer, State]]


def held_here(stream: Stream, storage: torch.UntypedStorage) -> Buffer | None:
    """The buffer of a storage; where its value is pending in another stream, that is run before."""
    found = stream.device.buffer(storage)
    if found is not None and found.stream is not None and found.stream is not stream:
        assert isinstance(found.stream, Stream)
        run.flush(found.stream, Reason("sync.thread"))
        found = stream.device.buffer(storage)
    return found


def device_input(stream: Stream, buffer: Buffer, lifts: bool = True) -> DeviceInput:
    """The input for a value that is on the device, or at home and counts as such; with `lifts` it is brought there.

    Raises:
        LostValue: the value was never computed.
    """
    if buffer.error is not None:
        raise run.lost(buffer)
    found = stream.reads.get(buffer.cdata)
    if found is None or found.array is not buffer.array:
        assert buffer.home is not None
        if lifts and buffer.is_at_home:
            buffer.lift()
        found = DeviceInput(stream.new_vid(), buffer.home, buffer, buffer.array, buffer.origin)
        stream.inputs.append(found)
        stream.reads[buffer.cdata] = found
    return found


def lift_inputs(stream: Stream) -> None:
    """Bring to the device what the first op of a stream reads at home."""
    for item in stream.inputs:
        if isinstance(item, DeviceInput) and item.array is None:
            item.buffer.lift()
            item.array = item.buffer.array


def lacks_memory(storage: torch.UntypedStorage) -> bool:
    """Whether there is nothing where a native storage's bytes should be, as with zero tensors."""
    try:
        return storage.nbytes() != 0 and not pointer_of(storage)
    except RuntimeError:  # torch's own word for it
        return True


def native_input(stream: Stream, storage: torch.UntypedStorage, home: Home, offset: int) -> NativeInput:
    """The input for native memory: the value `home` at `offset` bytes of a storage.

    Raises:
        Foreign: the storage has no memory.
    """
    known = stream.natives.get(storage._cdata)
    key: Hashable = (home, offset)
    found = None if known is None else known.get(key)
    if found is not None:
        return found
    if not stream.ahead and lacks_memory(storage):
        raise Foreign("a tensor has no memory (a zero tensor of forward-mode differentiation)")
    found = NativeInput(stream.new_vid(), home, storage, offset)
    if not stream.ahead and native.is_volatile(storage):
        # Others write this memory (NumPy, another process): what counts is what it holds now, at each read.
        native.snapshot(found)
    else:
        stream.natives.setdefault(storage._cdata, {})[key] = found
    stream.inputs.append(found)
    return found


def state_of(b: Buffer) -> State:
    """All that `make_pending` changes."""
    return b.stream, b.epoch, b.vid, b.home, b.array, b.previous, b.error


def make_pending(stream: Stream, buffer: Buffer, vid: int, home: Home) -> None:
    """From now on the storage's value is `vid`, which the stream will compute."""
    buffer.stream, buffer.epoch, buffer.vid, buffer.home = stream, stream.epoch, vid, home
    if buffer.array is not None:
        buffer.previous, buffer.array = buffer.array, None
    buffer.error = None
    stream.pending[buffer.cdata] = buffer


def restore(stream: Stream, b: Buffer, state: State) -> None:
    """Take back what `make_pending` did."""
    b.stream, b.epoch, b.vid, b.home, b.array, b.previous, b.error = state
    if b.stream is None:
        stream.pending.pop(b.cdata, None)
        if b.array is None and b.error is None:
            b.release()


def new_tensor(stream: Stream, output: Output, vid: int, undo: Undo) -> Tensor:
    """A tensor whose value will be `vid`."""
    t, buffer = stream.device.new(output.spec, output.nbytes)
    undo.append((buffer, _NOTHING))
    # The storage is new, so nothing in the table can be about it.
    buffer.table[buffer.cdata] = buffer
    buffer.stream, buffer.epoch, buffer.vid, buffer.home = stream, stream.epoch, vid, output.home
    stream.pending[buffer.cdata] = buffer
    return t


_NOTHING: State = (None, -1, -1, None, None, None, None)


def returned(template: Any, fresh: list[Tensor], tensors: list[Tensor]) -> Any:
    """What the call returns: `template` with its new tensors and those of its arguments that it hands back."""
    kind = type(template)
    if kind is Fresh:
        return fresh[template.index]
    if kind is Same:
        return tensors[template.index]

    def leave(leaf: Any) -> Any:
        if isinstance(leaf, Fresh):
            return fresh[leaf.index]
        return tensors[leaf.index] if isinstance(leaf, Same) else leaf

    return map_leaves(leave, template)


def may_overlap(tensors: list[Tensor], written: tuple[int, ...], info: OpInfo) -> bool:
    """Whether a written tensor shares memory with another operand that is not the same view: ATen has a say in that.

    If the op reads other places than it writes (`x.index_add_(0, i, x)`), the same view counts too, but for the one
    that it adds onto (`addmm(x, a, b, out=x)`).
    """
    if len(tensors) == 1:
        return False
    storages = [storage_of(t)._cdata for t in tensors]
    for i in written:
        if storages.count(storages[i]) > 1:
            if len(written) > 1:
                return True  # ATen goes through a list one by one, so each element sees what came before
            t = tensors[i]
            for n, (s, u) in enumerate(zip(storages, tensors, strict=True)):
                if s != storages[i] or n == i:
                    continue
                if (info.scattered and not (info.adds_onto and n == 0)) or not _same_view(t, u):
                    return True
    return False


def refusal(stream: Stream, info: OpInfo, tensors: list[Tensor], written: tuple[int, ...], overlapping: bool) -> str:
    """Why a call cannot be recorded, because of the memory that it writes; "" if it can. `overlapping`: a tensor that
    is written overlaps itself."""
    if written and may_overlap(tensors, written, info):
        return "it reads memory that it writes"
    real = stream.device.has_memory and not stream.ahead
    seen = real and any(native.must_stay(storage_of(tensors[i])) for i in written)
    if written and (overlapping or seen):
        return "it writes memory that others see, or that overlaps itself"
    return ""


def _same_view(t: Tensor, u: Tensor) -> bool:
    if t.itemsize != u.itemsize:
        return False  # such views share their first byte alone
    return t.shape == u.shape and t.stride() == u.stride() and offset_of(t) == offset_of(u)
