"""Ahead: a call is recorded before its operands have values, as the compiler door does with a graph.

It becomes the node that `record` makes of it; what is different is that nothing may run: where `record` would ask ATen
for a first run, this one refuses, and says why.
"""

from __future__ import annotations

from typing import Any

from ..quiet import through
from ..tracing.calls import CALLS, Foreign, new_call
from ..tracing.infer import Unknown
from ..tracing.numbers import are_taken, kinds
from ..tracing.opinfo import OpInfo
from ..tracing.stream import Stream
from ..tracing.trace import Operand
from .pending import refusal
from .record import TRUSTED, Tensor, defer, node_of, taken


class Refused(Exception):
    """The call cannot be recorded before it has run; the text says why."""


def record_ahead(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any], place: Any) -> Any:
    """Record one call on tensors without values, and return its outputs, which have none either.

    Args:
        stream: a stream of the caller's own, which nobody will flush.
        place: the line of the program that the op came from, as `log.site.here` tells it.

    Raises:
        Refused: only ATen can run it, or has to be the first to.
    """
    tensors: list[Tensor] = []
    scalars: list[Any] = []
    try:
        key = taken(stream, info, args, kwargs, tensors, scalars)
    except (Foreign, TypeError) as error:
        raise Refused(str(error)) from None
    call = CALLS.get(key)
    if call is None:
        call = new_call(info, key, tensors, args, kwargs)
    if isinstance(call, Unknown):
        raise Refused(call.reason)
    if call.alias:
        return through(info.op, args, kwargs)
    why = refusal(stream, info, tensors, call.written, call.overlapping)
    if call.structure not in TRUSTED:
        why = why or (call.unlike if info.island else call.doubt)
    if why:
        raise Refused(why)
    of_kind = kinds(scalars)
    if of_kind and of_kind not in call.taken:
        made = call.outputs[0].spec.dtype if call.outputs else tensors[0].dtype
        if not are_taken(info, args, kwargs, tensors, made):
            raise Refused("ATen might refuse its numbers")
        call.taken.add(of_kind)
    operands: list[Operand] = []
    try:
        node = node_of(stream, info, call, tensors, scalars, place, operands)
    except Foreign as error:
        raise Refused(str(error)) from None
    out = defer(stream, call, tensors, node.results, [])
    stream.nodes.append(node)
    return out


def forget(stream: Stream) -> None:
    """Let go of everything that was recorded: the tensors that stand for values hold none, and never will."""
    for cdata in stream.pending:
        stream.device.table.pop(cdata, None)
    stream.reset()
