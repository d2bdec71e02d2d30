"""Shadowing: a stream that has not come before is run by ATen, op by op, and written down as it goes.

Nothing is compiled for such a stream yet, so ATen would run it in any case, at its end. Run at once its ops raise,
allocate and free as in eager, and what a first step costs is what writing it down costs. What is written down is what
recording would have written: the stream ends at the same places, and is followed when it comes again.

The values of a shadowed stream are in native memory. Its buffers say which value of the stream a storage holds, and
nothing else: their storages are not trapped. When the stream has ended they are taken for values on the device, where
they will be when it comes again, and brought there if a stream that is not shadowed reads them.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.lowering import leaves
from fused_eager.fusion_rules.rule import rule_for
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ..compiling import lengths
from ..devices.buffer import sweep
from ..devices.home import nbytes_of
from ..devices.host.buffers import TABLE, HostBuffer
from ..devices.storage import offset_of, storage_of
from ..executing import run
from ..executing.materialize import materialize
from ..log.reasons import Reason
from ..policy.allowance import Shadowed
from ..tracing.calls import make_call, overlap, written
from ..tracing.infer import Unknown, described, is_sized_by_values
from ..tracing.opinfo import OpInfo
from ..tracing.stream import NativeInput, Node, Result, Stream
from ..tracing.structure import Call
from ..tracing.trace import MISS, Step
from . import native
from .native import call as run_natively
from .pending import refusal, returned

Tensor = torch.Tensor
ROOM = 1 << 20  # bytes that may be dead before it is looked for them
PART = 8  # and of what was alive then, this part


def is_due(stream: Stream) -> bool:
    """Whether a stream is about to begin that is to be shadowed, if it begins as it is expected to."""
    return stream.guess is not None and begins(stream, stream.guess)


def begins(stream: Stream, step: Step) -> bool:
    """Whether a stream is to be shadowed whose first op is at `step`."""
    return not step.warm and may_begin(stream, step.node.place)


def may_begin(stream: Stream, place: Hashable) -> bool:
    """Whether a stream that begins at `place` is to be shadowed if nothing is compiled for it.

    What is really on the device would have to be waited for.
    """
    if stream.nodes or stream.config.waits or place in lengths.PLACES:
        return False
    return all(isinstance(i, NativeInput) or i.array is None for i in stream.inputs)


def fetch(stream: Stream, tensors: Sequence[Tensor]) -> None:
    """Have the values of an op's operands in native memory, before it is recorded and run."""
    for t in tensors:
        b = TABLE.get(storage_of(t)._cdata)
        if b is not None and b.stream is not stream and not b.is_at_home:
            materialize(b, Reason("region.new"))


def perform_new(stream: Stream, info: OpInfo, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call that is unlike any before, so that what it returns need not be inferred. Returns what it returns;
    `MISS` where it may be one that cannot be recorded, and nothing has been run.

    For ops alone of which any call returns shapes that do not depend on values, and resizes nothing.
    """
    if info.island or not _may_be_described(info.op) or any(t.dtype not in JAX_DTYPE for t in tensors):
        return MISS
    if is_sized_by_values(info.op, args, kwargs, tensors):
        return MISS
    targets = written(info, args, kwargs)
    if refusal(stream, info, tensors, targets, overlap(tensors, targets)):
        return MISS
    for t in tensors:
        b = TABLE.get(storage_of(t)._cdata)
        if t._is_zerotensor() or (b is not None and b.error is not None):
            return MISS
    fetch(stream, tensors)
    if not stream.nodes:
        stream.shadowed = Shadowed()
    return perform(stream, info, args, kwargs, tensors, targets) if stream.shadowed else MISS


@functools.cache
def _may_be_described(op: OpOverload) -> bool:
    resizes = any(a.is_out for a in op._schema.arguments)
    return rule_for(op) is not None and not resizes


def learn(
    stream: Stream,
    info: OpInfo,
    key: tuple[Any, ...],
    tensors: list[Tensor],
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
) -> Call | None:
    """What there is to know of a call that has returned `out`; None if it is not to be recorded, and the stream has
    ended where it has to."""
    found = described(out, tensors)
    if isinstance(found, Unknown) or found.alias or any(s.device.type != "cpu" for s in found.fresh):
        run.flush(stream, Reason("sync.island", f"{info.op} returns what cannot be recorded"))
        return None
    call = make_call(info, key, tensors, args, kwargs, found)
    return None if call.tiny and all(storage_of(t)._cdata not in TABLE for t in tensors) else call


def perform(
    stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor], targets: Sequence[int]
) -> Any:
    """Run an op that writes those of its tensors whose positions are `targets`. Returns what it returns.

    Raises:
        Exception: whatever eager raises.
    """
    for i in targets:
        native.protect(storage_of(tensors[i]), of=stream)
    assert stream.shadowed is not None
    began = time.perf_counter()
    try:
        out = run_natively(info.op, args, kwargs)
    except BaseException:
        for i in targets:  # who knows what has been written
            stream.natives.pop(storage_of(tensors[i])._cdata, None)
        raise
    stream.shadowed.seconds += time.perf_counter() - began
    return out


def repeat(stream: Stream, step: Step, node: Node, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Run a call that is the next one of a remembered stream, whose inputs the stream has. Returns what it returns."""
    out = perform(stream, step.info, args, kwargs, tensors, step.call.written)
    stream.vids = step.vids
    out = adopt(stream, step.call, tensors, node.results, out)
    stream.nodes.append(node)
    stream.went(step)
    return out


def adopt(stream: Stream, call: Call, tensors: list[Tensor], results: Sequence[Result], out: Any) -> Any:
    """Note which storages hold the results of a call that has returned `out`. Returns what the program gets."""
    targets = {id(tensors[i]) for i in call.written}
    made = [t for t in leaves([out]) if isinstance(t, Tensor) and id(t) not in targets]
    fresh = [_own(stream, t, result) for t, result in zip(made, results[: len(call.outputs)], strict=True)]
    for i, result in zip(call.written, results[len(fresh) :], strict=True):
        _hold(stream, storage_of(tensors[i]), result, born_native=True)
    seen = stream.shadowed
    assert seen is not None
    seen.young += sum(storage_of(t).nbytes() for t in fresh)
    if seen.young > ROOM + seen.held // PART:
        seen.held, seen.young = _let_go(stream), 0
    return returned(call.template, fresh, tensors)


def _own(stream: Stream, t: Tensor, result: Result) -> Tensor:
    """A new output in memory of its own that is laid out as shape inference promised, which is how it is made when the
    stream is followed."""
    spec = result.spec
    if tuple(t.shape) != spec.shape or t.dtype != spec.dtype:
        raise RuntimeError(f"ATen returned {t.dtype}{tuple(t.shape)} where shape inference promised {spec}")
    storage = storage_of(t)
    promised = t.stride() == spec.strides and not (t.is_conj() or t.is_neg() or t._is_zerotensor())
    if not promised or offset_of(t) or storage.nbytes() != nbytes_of(result.home) or storage._cdata in TABLE:
        t = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype).copy_(t)
        storage = storage_of(t)
    _hold(stream, storage, result, born_native=False)
    return t


def _hold(stream: Stream, storage: torch.UntypedStorage, result: Result, born_native: bool) -> None:
    """Note that a storage now holds the value `result` of the stream."""
    b = TABLE.get(storage._cdata)
    if b is None:
        stream.natives.pop(storage._cdata, None)  # what was read of it there is no longer its value
        b = TABLE[storage._cdata] = HostBuffer(storage, born_native)
    b.stream, b.epoch, b.vid, b.home = stream, stream.epoch, result.vid, result.home
    stream.pending[storage._cdata] = b


def _let_go(stream: Stream) -> int:
    """Free the memory of what the program has no tensor of any more. Returns the bytes of what it has."""
    sweep(TABLE)
    inputs = Counter(i.storage._cdata for i in stream.inputs if isinstance(i, NativeInput))
    held = 0
    for cdata, b in list(stream.pending.items()):
        if inputs[cdata] or b.is_alive():  # an input is held until the stream ends
            held += b.storage.nbytes()
        else:
            del stream.pending[cdata], TABLE[cdata]
    return held
