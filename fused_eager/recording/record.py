"""Recording: an ATen call becomes a node of the stream, and its outputs become pending tensors.

In-place ops, `out=` and writes through views are functionalised at the level of storages: a read is a view of the
storage's current value, a write makes a new value of the whole storage.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from fused_eager.fusion_rules.lowering import leaves
from fused_eager.fusion_rules.rule import OVERWRITERS

from ..compiling import lengths
from ..devices.storage import offset_of, storage_of
from ..executing import run
from ..executing.island import judge
from ..log import site
from ..log.reasons import Reason
from ..policy.allowance import Shadowed, limits
from ..quiet import through
from ..tracing.calls import CALLS, Foreign, known_call, new_call, take
from ..tracing.infer import Unknown
from ..tracing.infer import is_loaded as inference_is_loaded
from ..tracing.numbers import are_taken, kinds
from ..tracing.opinfo import OpInfo
from ..tracing.stream import Node, Result, Stream, Use, start
from ..tracing.structure import Call, View
from ..tracing.trace import DEVICE, MEMORY, MISS, NATIVE, PENDING, Operand, Step
from . import native, shadow
from .follow import follow
from .moving import is_seen_to_move
from .pending import (
    Undo,
    device_input,
    held_here,
    lift_inputs,
    make_pending,
    native_input,
    new_tensor,
    refusal,
    restore,
    returned,
    state_of,
)

Tensor = torch.Tensor


class NotRecorded(Exception):
    """A call on an accelerator's tensors that cannot be recorded; the text says why. Nothing has happened."""


def _operand(stream: Stream, t: Tensor, view: View) -> Operand:
    """The value that a tensor's storage holds now (an input, if need be), and where in it the tensor lies.

    A gapless part of a value may begin elsewhere in the next round (`x[i]`): its offset is then a number like others.
    """
    storage = storage_of(t)
    buffer = held_here(stream, storage)
    offset, nbytes = offset_of(t), storage.nbytes()
    if buffer is None:
        item = native_input(stream, storage, view.block, offset * view.itemsize)
        return Operand(item.vid, offset, False, nbytes, NATIVE, item.home)
    moves = 0 <= view.covered < nbytes
    if buffer.stream is stream:
        return Operand(buffer.vid, offset, moves, nbytes, PENDING, None)
    # Whether a stream is shadowed is known after its first op.
    read = device_input(stream, buffer, lifts=bool(stream.nodes) and not stream.shadowed)
    return Operand(read.vid, offset, moves, nbytes, DEVICE, read.home)


def _write(stream: Stream, t: Tensor, view: View, use: Use) -> Result:
    """A new value for the storage of an operand, to be produced by the node that is being recorded."""
    storage = storage_of(t)
    buffer = stream.device.buffer(storage)
    offset = offset_of(t)
    g, base, home = view.geometry, None, view.block
    if offset or storage.nbytes() != view.covered:
        if buffer is None:
            home = (g.dtype, (storage.nbytes() // view.itemsize,))
            base = native_input(stream, storage, home, 0).vid
        else:
            base = buffer.vid if buffer.stream is stream else device_input(stream, buffer).vid
            assert buffer.home is not None
            home = buffer.home
    result = Result(stream.new_vid(), home, g, base, view.spec)
    if offset and start(use, result) is None:
        result = result._replace(geometry=g._replace(offset=offset))
    return result


def defer(stream: Stream, call: Call, tensors: list[Tensor], results: Sequence[Result], undo: Undo) -> Any:
    """Make a call's results pending. Returns what it returns."""
    fresh = [new_tensor(stream, o, r.vid, undo) for o, r in zip(call.outputs, results)]  # noqa: B905 (a prefix)
    for i, result in zip(call.written, results[len(fresh) :], strict=True):
        storage = storage_of(tensors[i])
        buffer = stream.device.buffer(storage)
        if buffer is None:
            buffer = native.open_native(storage, stream.ahead)
        undo.append((buffer, state_of(buffer)))
        make_pending(stream, buffer, result.vid, result.home)
    return returned(call.template, fresh, tensors)


def _forgive(stream: Stream, info: OpInfo, t: Tensor, view: View) -> None:
    """A tensor whose value was lost may be overwritten: it then has one again."""
    b = stream.device.buffer(storage_of(t))
    if b is None or b.error is None or b.storage.nbytes() != view.covered:
        return
    if info.op._schema.name in OVERWRITERS or any(a.is_out for a in info.op._schema.arguments):
        b.release()


def taken(
    stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], scalars: list[Any]
) -> tuple[Any, ...]:
    """Take a call apart into `tensors` and hoisted `scalars`. Returns the rest, which is its structure.

    Raises:
        Foreign, TypeError: an argument is none that can be recorded.
    """
    parts: list[Any] = [info.number, torch.get_default_dtype()]
    hoisted, device = info.hoisted, stream.device
    for i, a in enumerate(args):
        take(a, i in hoisted, parts, tensors, scalars, device)
    if kwargs:
        for name in sorted(kwargs):
            parts.append(name)
            take(kwargs[name], info.names.index(name) in hoisted, parts, tensors, scalars, device)
    return tuple(parts)


def record(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record one call and return its outputs; or, where that cannot be, run it natively now."""
    if not stream.nodes:
        stream.shadowed = None  # what began it turned out to be nothing to record
    if not shadow.is_due(stream):
        out = follow(stream, info, args, kwargs)
        if out is not MISS:
            return out
    tensors: list[Tensor] = []
    scalars: list[Any] = []
    key: tuple[Any, ...] = ()
    try:
        key = taken(stream, info, args, kwargs, tensors, scalars)
        call = CALLS.get(key)
        if not info.on_cpu and stream.device.has_memory:
            call = Unknown("torch has no kernel of it for CPU tensors")  # and says so
    except (Foreign, TypeError) as error:  # TypeError: a structural argument that cannot be hashed
        call = Unknown(str(error))
    if call is None and (stream.shadowed or shadow.may_begin(stream, site.here())):
        out = shadow.perform_new(stream, info, tensors, args, kwargs)
        if out is not MISS:
            call = shadow.learn(stream, info, key, tensors, args, kwargs, out)
            if call is None:
                return out
            call.taken.add(kinds(scalars))
            return _append(stream, info, call, args, kwargs, tensors, scalars, [], out)
    if call is None and stream.nodes and not stream.shadowed and stream.device.has_memory:
        # What these return need not be inferred: torch's compiler, which does that, takes a second to import.
        if lengths.strays(stream, stream.expected(), (info, site.here()), tensors):
            end_strayed(stream, info)
            return native.run_through(stream, info, args, kwargs, stream.policy.backoff.code)
        if limits(stream.config) and not inference_is_loaded():
            call = known_call(info, key, tensors, args, kwargs)
            if call is None:  # as the first of another stream it is run
                run.flush(stream, Reason("region.new", f"such a call of {info.op} has not come before"))
                return record(stream, info, args, kwargs)
    if call is None:
        call = new_call(info, key, tensors, args, kwargs)
    if type(call) is Unknown:
        return _at_once(stream, info, args, kwargs, call.reason)
    assert isinstance(call, Call)
    if call.alias:
        if not stream.device.has_memory:
            raise NotRecorded("it returns a view that its schema does not declare")
        return through(info.op, args, kwargs)
    written = call.written
    if call.tiny and _is_native(stream, tensors):
        return native.run_tiny(info, args, kwargs, [tensors[i] for i in written])
    why = refusal(stream, info, tensors, written, call.overlapping)
    if why and len(written) > 1 and _goes_one_by_one(info, args):
        return _one_by_one(stream, info, args, kwargs)
    if why:
        return _at_once(stream, info, args, kwargs, why)
    if info.island and stream.config.islands != "allow":
        judge(stream.config, info.op, site.here(), info.island)
    of_kind = kinds(scalars)
    if of_kind and of_kind not in call.taken:
        made = call.outputs[0].spec.dtype if call.outputs else tensors[0].dtype
        if not are_taken(info, args, kwargs, tensors, made):
            out = _at_once(stream, info, args, kwargs, "ATen might refuse its numbers")
            call.taken.add(of_kind)  # it did not
            return out
        call.taken.add(of_kind)
    if call.doubt and call.structure not in TRUSTED:
        return _first_time(stream, info, call, key, args, kwargs)
    undo: Undo = []
    try:
        return _append(stream, info, call, args, kwargs, tensors, scalars, undo)
    except Foreign as error:
        for buffer, state in reversed(undo):
            restore(stream, buffer, state)
        return _at_once(stream, info, args, kwargs, str(error))
    except BaseException:
        # Ctrl-C, or the value of an operand is lost: as if the op had not been called.
        for buffer, state in reversed(undo):
            restore(stream, buffer, state)
        if not stream.nodes:
            stream.reset()  # what it was to read may be at home, where only a shadowed stream finds it
        raise


def _goes_one_by_one(info: OpInfo, args: Any) -> bool:
    """Whether an op does with a list of tensors what it would do with each in turn."""
    if not (info.writes_list and info.op._schema.name.startswith("aten::_foreach_")):
        return False
    return not ("scalars" in info.names and isinstance(args[info.names.index("scalars")], Tensor))


def _one_by_one(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record such a call, whose tensors share memory, as one of each: as ATen does it. What of them is written where
    others are read is for the calls to say."""
    number = len(args[info.written[0]])
    for i in range(number):
        of_one = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == number else a for a in args]
        out = record(stream, info, tuple(of_one), kwargs)
    return out


def _is_native(stream: Stream, tensors: Sequence[Tensor]) -> bool:
    """Whether all values are finished, in the host's memory."""
    return stream.device.has_memory and all(stream.device.buffer(storage_of(t)) is None for t in tensors)


def _at_once(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], why: str) -> Any:
    """Have ATen run a call that cannot be recorded, where it can: in the host's memory.

    Raises:
        NotRecorded: the device's storages have no memory, so whoever called has to bring the values to ATen.
    """
    if not stream.device.has_memory:
        raise NotRecorded(why)
    return native.run_now(stream, info, args, kwargs, why)


# Doubtful calls whose real outputs have been seen to be what shape inference promised.
TRUSTED: set[int] = set()


def _first_time(stream: Stream, info: OpInfo, call: Call, key: Hashable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a doubtful call at once through ATen, which raises what eager raises, and see what it returns.

    If that is what shape inference promised, the next such call is deferred.
    """
    given = [t for t in leaves([args, kwargs]) if isinstance(t, Tensor)]
    shapes = [t.shape for t in given]
    out = _at_once(stream, info, args, kwargs, call.doubt)
    own = {id(t) for t in given}
    real = [t for t in leaves([out]) if isinstance(t, Tensor) and id(t) not in own]
    if [t.shape for t in given] != shapes:
        CALLS[key] = Unknown("ATen resizes an argument")
        return out
    promised = [output.spec for output in call.outputs]
    if [(tuple(t.shape), t.dtype, t.stride()) for t in real] == [(s.shape, s.dtype, s.strides) for s in promised]:
        TRUSTED.add(call.structure)
    else:
        CALLS[key] = Unknown(f"{call.doubt}, and returns other tensors than it promises")
    return out


def node_of(
    stream: Stream,
    info: OpInfo,
    call: Call,
    tensors: list[Tensor],
    scalars: list[Any],
    place: tuple[Any, ...] | None,
    operands: list[Operand],
) -> Node:
    """The node of a call: what it reads of the stream's values, which go to `operands`, and what it makes."""
    uses: list[Use] = []
    signature: list[Any] = [call.structure]
    for i, (t, view) in enumerate(zip(tensors, call.views, strict=True)):
        operand = _operand(stream, t, view)
        if view.covered < 0 and not stream.device.has_memory:
            at = stream.device.name, stream.at.depth, place, call.structure, i
            operand = operand._replace(moves=is_seen_to_move(at, operand.offset))
        operands.append(operand)
        geometry, offset = view.geometry, 0 if operand.where is NATIVE else operand.offset
        if operand.moves:
            uses.append(Use(operand.vid, geometry, len(scalars), math.prod(view.block[1])))
            scalars.append(offset)
            offset = -1
        else:
            uses.append(Use(operand.vid, geometry if offset == 0 else geometry._replace(offset=offset)))
        signature += (operand.vid, offset)
    results = [Result(stream.new_vid(), o.home, o.geometry, None, o.spec) for o in call.outputs]
    for i in call.written:
        result = _write(stream, tensors[i], call.views[i], uses[i])
        signature.append((result.base, result.home, result.geometry.offset))  # the first operand's says if it moves
        results.append(result)
    return Node(
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
        place,
    )


def _append(
    stream: Stream,
    info: OpInfo,
    call: Call,
    args: Any,
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    scalars: list[Any],
    undo: Undo,
    out: Any = MISS,
) -> Any:
    """Record a call. `out` is what it has returned, if it has been run."""
    for i in call.written:
        _forgive(stream, info, tensors[i], call.views[i])
    if stream.shadowed and out is MISS:
        shadow.fetch(stream, tensors)
    operands: list[Operand] = []
    place = site.here()
    node = node_of(stream, info, call, tensors, scalars, place, operands)
    results = node.results
    step = Step(info, call, node, tuple(operands), stream.vids, len(stream.nodes) + 1)
    # Besides the signature: what it does not say of the stream's inputs, and the line, which reports name.
    expected = stream.expected()
    known = MEMORY.add(stream.at, (node.signature, place, tuple([o.home for o in operands]), stream.device.name), step)
    if stream.shadowed is None and shadow.begins(stream, known):
        stream.shadowed = Shadowed()
    if stream.shadowed:
        if out is MISS:
            out = shadow.perform(stream, info, args, kwargs, tensors, call.written)
        out = shadow.adopt(stream, call, tensors, results, out)
    else:
        if not stream.nodes:
            lift_inputs(stream)
        out = defer(stream, call, tensors, results, undo)
    stream.nodes.append(node)
    stream.went(known)
    is_new = known is step and stream.device.has_memory
    stream.strayed = is_new and lengths.strays(stream, expected, (info, place), tensors, call.outputs)
    return out


def end_strayed(stream: Stream, info: OpInfo) -> None:
    """End a stream where a length comes that is new: nobody knows whether it will come again, and what follows, up to
    the next sync point, is not written down this time."""
    stream.strayed = True
    run.flush(stream, Reason("region.new", f"{info.op} has come with another length"))
    stream.policy.backoff.rest_until_sync()
