"""Following: an op that does what a remembered stream did next is compared with it, and nothing is worked out again.

What recording would look up, infer and write down is the same whenever the op, the structure of its arguments, the
values that its tensors see and how they see them are the same. So exactly that is compared; at the first difference
the op is recorded as if there were no memory, and nothing has to be taken back.
"""

from __future__ import annotations

from typing import Any

import torch

from . import buffers, native, site
from .buffers import TABLE, Buffer, storage_of
from .calls import View
from .opinfo import OpInfo
from .pattern import matches
from .pending import device_input, make_pending, may_overlap, native_input, new_tensor, restore, returned, state_of
from .stream import Stream
from .trace import NATIVE, PENDING, Operand, Step

Tensor = torch.Tensor
MISS = object()  # the op is not the one that came next last time
_offset = torch._C.TensorBase.storage_offset


def follow(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """The outputs of an op that is the next one of a remembered stream; `MISS` if it is another one.

    A miss leaves the stream as it was, but for inputs that recording the op would have added as well.
    """
    at = stream.at
    step = at.likely if at.depth else stream.guess
    if step is None or step.info is not info:
        return MISS
    call, node = step.call, step.node
    tensors: list[Tensor] = []
    scalars: list[Any] = []
    if len(args) != len(call.rows) or len(kwargs) != len(call.named) or torch.get_default_dtype() is not step.default:
        return MISS
    if not matches(call.rows, args, tensors, scalars):
        return MISS
    for name, rows in call.named:
        if name not in kwargs or not matches(rows, (kwargs[name],), tensors, scalars):
            return MISS
    if site.here() != node.place or (info.island and stream.config.islands != "allow"):
        return MISS
    found: list[Buffer | None] = []
    for t, operand, view in zip(tensors, step.operands, call.views, strict=True):
        storage = storage_of(t)
        buffer = TABLE.get(storage._cdata)
        found.append(buffer)
        offset = _offset(t)
        if buffer is not None and buffer.stream is stream:
            if buffer.vid != operand.vid:
                return MISS
        elif not _is_input(stream, t, storage, buffer, offset, operand, view):
            return MISS
        if storage.nbytes() != operand.nbytes:
            return MISS
        if operand.where is NATIVE:
            continue  # it is its own input, wherever it begins
        if operand.moves:
            scalars.append(offset)
        elif offset != operand.offset:
            return MISS
    if call.written and not _may_write(step, tensors, found):
        return MISS
    results = node.results
    if results and stream.vids != results[0].vid:
        return MISS
    if scalars and (0 in scalars or scalars != node.scalars):  # 0.0 == -0.0, but they are two numbers
        node = node.with_scalars(scalars)

    undo: list[tuple[Buffer, tuple[Any, ...]]] = []
    try:
        fresh = [new_tensor(stream, o, r.vid, undo) for o, r in zip(call.outputs, results)]  # noqa: B905 (a prefix)
        for i, result in zip(call.written, results[len(fresh) :], strict=True):
            target = found[i]
            if target is None:
                storage = storage_of(tensors[i])
                native.hand_over(storage)
                target = buffers.open_buffer(storage, born_native=True)
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


def _is_input(
    stream: Stream,
    t: Tensor,
    storage: torch.UntypedStorage,
    buffer: Buffer | None,
    offset: int,
    operand: Operand,
    view: View,
) -> bool:
    """Whether a tensor that is not pending here is the input that it was last time."""
    if buffer is None:
        if operand.where is not NATIVE or not t.is_cpu or not (storage.data_ptr() or not storage.nbytes()):
            return False
        item: Any = native_input(stream, storage, view.block, offset * view.itemsize)
    else:
        if operand.where in (NATIVE, PENDING) or buffer.stream is not None or buffer.error is not None:
            return False
        item = device_input(stream, buffer)
    return bool(item.vid == operand.vid and item.home == operand.home)


def _may_write(step: Step, tensors: list[Tensor], found: list[Buffer | None]) -> bool:
    """Whether the writes of an op may be recorded as they were last time."""
    written = step.call.written
    if len(tensors) > 1:
        storages = [storage_of(t)._cdata for t in tensors]
        if any(storages.count(storages[i]) > 1 for i in written) and may_overlap(tensors, written):
            return False
    fresh = len(step.call.outputs)
    for k, i in enumerate(written):
        if found[i] is None and (
            step.node.results[fresh + k].base is not None
            or _offset(tensors[i]) != step.operands[i].offset
            or native.must_stay(storage_of(tensors[i]))
        ):
            return False
    return True
