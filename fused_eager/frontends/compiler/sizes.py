"""Sizes: which size of a graph varies, and what the graph is called with where it has another value.

Dynamo says what varies: the shapes of a graph's inputs are written with symbols. Where one of them alone differs from
call to call, the graph is recorded at the ends of its bucket (`compiling.buckets`) as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fused_eager.fusion_rules.padded import Refused

from ...compiling import buckets
from ...compiling.buckets import LEAST, Bucket, Streams, bucket_of
from ...executing.load import ISLANDS
from .program import Program
from .stage import Stage

Tensor = torch.Tensor
Env = dict[Any, int]  # symbols and what they are


def _expression(n: Any) -> Any:
    """What a size is written with; itself where it is a number."""
    return n.node.expr if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) else n


def symbols(graph: GraphModule, args: Sequence[Any]) -> Env:
    """What the symbols of a graph are in a call.

    Raises:
        Refused: they do not tell what the arguments are.
    """
    env: Env = {}
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), args, strict=True):
        val = node.meta.get("val")
        if isinstance(val, Tensor) and isinstance(value, Tensor) and val.layout is torch.strided:
            pairs = [*zip(val.shape, value.shape, strict=True), *zip(val.stride(), value.stride(), strict=True)]
        else:
            pairs = [(val, value)]
        for n, now in pairs:
            expression = _expression(n)
            if getattr(expression, "is_Symbol", False) and type(now) is int:
                env.setdefault(expression, now)
    return env


def at(graph: GraphModule, args: Sequence[Any], env: Env) -> list[Any]:
    """The arguments of a call, or memory of their form, where the symbols are others.

    Raises:
        Refused: a size cannot be computed from the symbols.
    """

    def size(n: Any) -> int:
        expression = _expression(n)
        if isinstance(expression, int):
            return expression
        found = expression.subs(env)
        if not found.is_Integer:
            raise Refused("a size is no function of the others")
        return int(found)

    made: list[Any] = []
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), args, strict=True):
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            made.append(size(val))
        elif isinstance(val, (torch.SymFloat, torch.SymBool)):
            raise Refused("a number that is no size varies")
        elif not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
            made.append(value)
        elif not isinstance(val, Tensor):
            raise Refused("the form of an argument is not known")
        else:
            shape, strides = list(map(size, val.shape)), list(map(size, val.stride()))
            made.append(value if (shape, strides) == (list(value.shape), list(value.stride()))
                        else _like(value, shape, strides))  # fmt: skip
    return made


def _like(value: Tensor, shape: list[int], strides: list[int]) -> Tensor:
    if value.is_conj() or value.is_neg():
        raise Refused("an argument is conjugated")
    return torch.empty_strided(shape, strides, dtype=value.dtype)


def varying(before: Env, now: Env) -> tuple[Any, Bucket]:
    """The one size that differs between two calls, and its bucket.

    Raises:
        Refused: none does, or several, or it is too small.
    """
    found = [s for s, n in now.items() if before.get(s) != n]
    if len(found) != 1:
        raise Refused(f"{len(found)} sizes change at a time" if found else "no size changes")
    if now[found[0]] < LEAST:
        raise Refused("a size below two")
    return found[0], bucket_of(now[found[0]])


def make_ready(size: int, bucket: Bucket, now: Program, high: Program, low: Program, middle: Program) -> None:
    """Give a program the executables of its bucket.

    Raises:
        Refused: it is another program at another size, or what is padded would be seen.
    """
    programs = (now, high, low, middle)
    if len({len(p.steps) for p in programs}) > 1:
        raise Refused("it has not as many steps at each size")
    made = []
    for steps in zip(*(p.steps for p in programs), strict=True):
        if len({type(step) for step in steps}) > 1:
            raise Refused("its steps are others at another size")
        stages = [step for step in steps if isinstance(step, Stage)]
        if stages:
            if len({(tuple(v for v, *_ in s.inputs), s.outputs, tuple(w[:2] for w in s.written)) for s in stages}) > 1:
                raise Refused("its values go elsewhere at another size")
            works = [s.work for s in stages]
            islands = {i: ISLANDS[n.signature[0]] for i, n in enumerate(works[1].nodes) if n.signature[0] in ISLANDS}  # type: ignore[index]
            made.append((stages[0], buckets.ready(Streams(size, bucket, *works), islands)))
    for stage, ready in made:
        stage.kept.keep(ready)
