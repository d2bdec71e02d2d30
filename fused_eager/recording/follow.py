"""Following: an op that does what a remembered stream did next is compared with it, and nothing is worked out again.

What recording would look up, infer and write down is the same whenever the op, the structure of its arguments, the
values that its tensors see and how they see them are the same. So exactly that is compared; at the first difference
the op is recorded as if there were no memory, and nothing has to be taken back.
"""

from __future__ import annotations

from typing import Any

import torch

from ..devices.buffer import Buffer
from ..devices.home import Home
from ..devices.storage import offset_of, storage_of
from ..log import site
from ..tracing.numbers import kinds
from ..tracing.opinfo import OpInfo
from ..tracing.pattern import matches
from ..tracing.stream import DeviceInput, NativeInput, Stream, start
from ..tracing.trace import DEVICE, MISS, NATIVE, Step
from . import native, shadow
from .pending import (
    Undo,
    device_input,
    lacks_memory,
    make_pending,
    may_overlap,
    native_input,
    new_tensor,
    restore,
    returned,
    state_of,
)

Tensor = torch.Tensor
_default_dtype = torch.get_default_dtype


def follow(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """The outputs of an op that is the next one of a remembered stream; `MISS` if it is another one.

    A miss leaves everything as it was.
    """
    step = stream.expected()
    if step is None or step.info is not info:
        return MISS
    call, node = step.call, step.node
    tensors: list[Tensor] = []
    scalars: list[Any] = []
    if len(args) != len(call.rows) or len(kwargs) != len(call.named) or _default_dtype() is not step.default:
        return MISS
    if not matches(call.rows, args, tensors, scalars):
        return MISS
    for name, rows in call.named:
        if name not in kwargs or not matches(rows, (kwargs[name],), tensors, scalars):
            return MISS
    if scalars and scalars != node.scalars[: len(scalars)] and kinds(scalars) not in call.taken:
        return MISS  # ATen has to be asked
    if not site.is_at(node.place) or (info.island and stream.config.islands != "allow"):
        return MISS
    shadowed, lookup = stream.shadowed is not None, stream.device.table.get
    found: list[Buffer | None] = []
    new = _NewInputs(stream)
    for t, (vid, at_offset, moves, nbytes, where, home) in zip(tensors, step.operands):  # noqa: B905 (equal rows)
        try:
            storage = storage_of(t)
        except NotImplementedError:
            return MISS  # a tensor of oneDNN's has strides, and no storage
        buffer = lookup(storage._cdata)
        offset = offset_of(t)
        if storage.nbytes() != nbytes:
            return MISS
        if buffer is not None and buffer.stream is stream:
            if buffer.vid != vid:
                return MISS
        elif shadowed and buffer is not None and not buffer.is_at_home:
            return MISS
        else:
            view = call.views[len(found)]
            if new.number(t, storage, buffer, where, view.block, offset * view.itemsize, home) != vid:
                return MISS
        found.append(buffer)
        if where is NATIVE:
            continue  # it is its own input, wherever it begins
        if moves:
            scalars.append(offset)
        elif offset != at_offset:
            return MISS
    if call.written and not _may_write(step, tensors, found):
        return MISS
    results = node.results
    if results and stream.vids + len(new.missing) != results[0].vid:
        return MISS
    if scalars and (0 in scalars or scalars != node.scalars):  # 0.0 == -0.0, but they are two numbers
        node = node.with_scalars(scalars)
    if shadowed:
        new.add()
        return shadow.repeat(stream, step, node, args, kwargs, tensors)

    undo: Undo = []
    try:
        new.add()
        fresh = [new_tensor(stream, o, r.vid, undo) for o, r in zip(call.outputs, results)]  # noqa: B905 (a prefix)
        for i, result in zip(call.written, results[len(fresh) :], strict=True):
            target = found[i]
            if target is None:
                target = native.open_native(storage_of(tensors[i]))
            undo.append((target, state_of(target)))
            make_pending(stream, target, result.vid, result.home)
        stream.vids = step.vids
        stream.nodes.append(node)
        stream.went(step)
    except BaseException:
        for target, state in reversed(undo):
            restore(stream, target, state)
        raise
    return returned(call.template, fresh, tensors)


class _NewInputs:
    """Inputs that an op brings to the stream if it turns out to be followed."""

    __slots__ = ("missing", "stream")

    def __init__(self, stream: Stream):
        self.stream = stream
        self.missing: list[tuple[torch.UntypedStorage, Buffer | None, Home, int]] = []

    def number(
        self,
        t: Tensor,
        storage: torch.UntypedStorage,
        buffer: Buffer | None,
        where: str,
        block: Home,
        offset: int,
        home: Home | None,
    ) -> int:
        """The number that the value of a tensor which is not pending here has as an input; -1 where it has to be found
        out by recording. `home` is what it was last time."""
        stream = self.stream
        known: NativeInput | DeviceInput | None
        if buffer is None:
            if where is not NATIVE or block != home or not t.is_cpu or lacks_memory(storage):
                return -1
            known = stream.natives.get(storage._cdata, _NONE).get((block, offset))
        else:
            if where is not DEVICE or buffer.stream is not None or buffer.error is not None or buffer.home != home:
                return -1
            known = stream.reads.get(buffer.cdata)
            if known is not None and known.array is not buffer.array:
                known = None
        if known is not None:
            return known.vid
        wanted = (storage, buffer, block, offset)
        if wanted not in self.missing or (buffer is None and native.is_volatile(storage)):
            self.missing.append(wanted)
            return stream.vids + len(self.missing) - 1
        return stream.vids + self.missing.index(wanted)

    def add(self) -> None:
        """Bring them to the stream."""
        for storage, buffer, block, offset in self.missing:
            if buffer is None:
                native_input(self.stream, storage, block, offset)
            else:
                device_input(self.stream, buffer, lifts=not self.stream.shadowed)


_NONE: dict[Any, Any] = {}


def _may_write(step: Step, tensors: list[Tensor], found: list[Buffer | None]) -> bool:
    """Whether the writes of an op may be recorded as they were last time."""
    written = step.call.written
    if len(tensors) > 1:
        storages = [storage_of(t)._cdata for t in tensors]
        if any(storages.count(storages[i]) > 1 for i in written) and may_overlap(tensors, written, step.info):
            return False
    fresh = len(step.call.outputs)
    for k, i in enumerate(written):
        result = step.node.results[fresh + k]
        if offset_of(tensors[i]) != step.operands[i].offset and start(step.node.uses[i], result) is None:
            return False
        if found[i] is None and (result.base is not None or native.must_stay(storage_of(tensors[i]))):
            return False
    return True
