"""Control flow: `cond`, `while_loop` and `scan` of a graph as JAX's own.

Their graphs are recorded as the whole is, each as one function of arrays, and what they make together is a program as
one that a user wrote in JAX: an op of the stream, fused with its neighbours. AOTAutograd has made the derivatives
before, of the same three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax import lax
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule

from fused_eager.cache import Key, Unencodable

from ...compiling import canonical
from ...config import Config
from ...errors import ExportError
from ...planning.plan import may_check
from ..kernels import program as programs
from ..kernels.dispatch import packet
from ..kernels.program import Program as JaxProgram
from ..kernels.program import form_of
from .stablehlo import Iteration
from .stage import in_own_thread

Tensor = torch.Tensor
Record = Callable[[GraphModule, Config, Sequence[Tensor]], Any]


class Unlike(Exception):
    """Why a call is not lowered to JAX's control flow."""


def taken(target: Any, args: Sequence[Any]) -> tuple[list[GraphModule], list[int], list[Any]] | None:
    """The graphs of a call, how many operands each further group has, and the operands; None if it is none of these."""
    if not isinstance(target, HigherOrderOperator):
        return None
    name = target.name()
    if name == "cond":
        return [args[1], args[2]], [], [args[0], *args[3]]
    if name == "while_loop":
        return [args[0], args[1]], [len(args[2])], [*args[2], *args[3]]
    if name == "scan":
        return [args[0]], [len(args[1]), len(args[2])], [*args[1], *args[2], *args[3]]
    return None


def lowered(
    target: HigherOrderOperator, parts: tuple[list[GraphModule], list[int], list[Any]], record: Record, config: Config
) -> tuple[OpOverload, tuple[Any, ...]]:
    """The op that stands for a call, and its arguments.

    Raises:
        Unlike: something of it has to be torch's.
    """
    graphs, counts, operands = parts
    name = target.name()
    if not all(isinstance(x, Tensor) for x in operands):
        raise Unlike("a number is among what it is called with")
    forms = [torch.empty(x.shape, dtype=x.dtype) for x in operands]
    inner = {"cond": forms[1:], "while_loop": forms, "scan": forms}[name]
    if name == "scan":
        first, xs = counts
        inner = [*forms[:first], *[x[0] for x in forms[first : first + xs]], *forms[first + xs :]]
    functions = [_function(graph, record, config, inner) for graph in graphs]
    try:
        digest = Key({"control": [name, counts, list(map(_said, functions))]}).digest
    except Unencodable as why:
        raise Unlike(str(why)) from why
    made = JaxProgram(name, hashlib.sha256(digest.encode()).hexdigest(), _CALLS[name](functions, counts),
                      programs.mode_of(True))  # fmt: skip
    made = programs.known(made)
    try:
        in_own_thread(lambda: made.traced(form_of(operands), ()))
    except Exception as why:  # the lowering of an op, or JAX, which asks more of a loop's state than torch
        raise Unlike(f"it cannot be lowered: {str(why).partition(chr(10))[0][:200]}") from why
    return packet(f"fused_eager_control::{name}")["call"], (list(operands), [], made.name)


def _function(graph: GraphModule, record: Record, config: Config, inner: Sequence[Tensor]) -> Iteration:
    """One of its graphs, as a function of arrays."""
    if any(str(node.target).startswith("aten.as_strided") for node in graph.graph.nodes):
        raise Unlike("it counts memory from the beginning of a storage")
    made = record(graph, config, inner)
    if made.constants or made.rooted:
        raise Unlike("it has constants of its own")
    try:
        found = Iteration(made)
    except ExportError as why:
        raise Unlike(f"one of its graphs is not one function: {why}") from why
    if found.stage is not None and any(may_check(node) for node in found.stage.work.nodes):
        raise Unlike("an error that values reveal would not be seen in it")
    return found


def _said(function: Iteration) -> list[Any]:
    """All that a function depends on. Numbers, which regions are called with, are its own here."""
    around = repr((function.program.arguments, function.program.result))
    if function.stage is None:
        return [around]
    stage = function.stage
    numbers = repr([node.scalars for node in stage.work.nodes])
    slots = repr((stage.inputs, stage.outputs, stage.written, function.allocated))
    return [around, canonical.to_parts(function.computation()), numbers, slots]


def _call(function: Iteration, arrays: Sequence[Any]) -> list[Any]:
    slots = function.program.arguments
    return function({slot: x for slot, x in zip(slots, arrays, strict=True) if slot is not None})


def _cond(functions: list[Iteration], counts: list[int]) -> Any:
    then, other = functions

    def call(operands: list[Any], numbers: list[Any]) -> tuple[list[Any], Any]:
        predicate, *given = operands
        made = lax.cond(predicate.reshape(()), lambda *x: _call(then, x), lambda *x: _call(other, x), *given)
        return list(made), None

    return call


def _while(functions: list[Iteration], counts: list[int]) -> Any:
    goes_on, body = functions
    (carried,) = counts

    def call(operands: list[Any], numbers: list[Any]) -> tuple[list[Any], Any]:
        state, more = operands[:carried], operands[carried:]
        made = lax.while_loop(
            lambda x: _call(goes_on, [*x, *more])[0].reshape(()), lambda x: _call(body, [*x, *more]), state
        )
        return list(made), None

    return call


def _scan(functions: list[Iteration], counts: list[int]) -> Any:
    (combine,) = functions
    first, xs = counts

    def call(operands: list[Any], numbers: list[Any]) -> tuple[list[Any], Any]:
        state, rows, more = operands[:first], operands[first : first + xs], operands[first + xs :]

        def step(carry: Any, row: Any) -> tuple[Any, Any]:
            made = _call(combine, [*carry, *row, *more])
            return made[:first], made[first:]

        last, stacked = lax.scan(step, list(state), list(rows))
        return [*last, *stacked], None

    return call


_CALLS: dict[str, Callable[[list[Iteration], list[int]], Any]] = {"cond": _cond, "while_loop": _while, "scan": _scan}
