"""Sizes: which size of a graph varies, and what the graph is called with where it has another value.

Dynamo says what varies: the shapes of a graph's inputs are written with symbols. Where one of them alone differs from
call to call, and counts large rows that do not depend on each other, the graph is run in blocks of rows
(`compiling.lengths`). Else it is recorded at the ends of its bucket (`compiling.buckets`) as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fused_eager.fusion_rules.padded import Refused

from ...compiling import buckets, lengths, template
from ...compiling.buckets import LEAST, Bucket, Planned, Streams, bucket_of
from ...compiling.template import Template
from ...executing.load import ISLANDS
from ...lowering.failed import NodeFailed
from ...planning.plan import Work
from .program import Program
from .stage import Stage

Tensor = torch.Tensor
Env = dict[Any, int]  # symbols and what they are
Templates = tuple[Template | None, ...]  # of a program's stages; None for one that is the same for any size


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
        if expression in env:
            return env[expression]
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


def varying(before: Env, now: Env) -> tuple[list[Any], Bucket]:
    """The one size that differs between two calls, as all of its symbols, and its bucket. Dynamo may have a symbol for
    each tensor: those that were alike, and are, are one size.

    Raises:
        Refused: none differs, or several, or it is too small.
    """
    found = [s for s, n in now.items() if before.get(s) != n]
    sizes = {(before.get(s), now[s]) for s in found}
    if len(sizes) != 1:
        raise Refused(f"{len(sizes)} sizes change at a time" if found else "no size changes")
    size = now[found[0]]
    if size < LEAST:
        raise Refused("a size below two")
    return found, bucket_of(size)


def allowed(graph: GraphModule, symbols: Sequence[Any], now: Env, bucket: Bucket) -> Bucket:
    """The part of a bucket for which Dynamo calls this graph: at other sizes, its ops need not make sense.

    Raises:
        Refused: that part is too small to tell what is linear in the size.
    """
    from sympy import false  # type: ignore[import-untyped] # torch has imported it to trace the graph

    guards = _guards(graph)

    def fits(size: int) -> bool:
        env = {**now, **dict.fromkeys(symbols, size)}
        try:
            return not any(guard.subs(env) is false for guard in guards)
        except Exception:  # such as a division by zero
            return False

    size = now[symbols[0]]
    high = next(n for n in range(bucket.high, size - 1, -1) if n == size or fits(n))
    low = next(n for n in range(bucket.low, size + 1) if n == size or fits(n))
    between = sorted(range(low + 1, high), key=lambda n: abs(n - bucket.middle))
    middle = next(filter(fits, between), None)
    if middle is None:
        raise Refused("few sizes of its bucket belong to this graph")
    return Bucket(high, low, middle)


def _guards(graph: GraphModule) -> list[Any]:
    """What Dynamo asks of a graph's symbols at each call, as conditions of sympy's."""
    for node in graph.graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        for n in (*val.shape, *val.stride()) if isinstance(val, Tensor) and val.layout is torch.strided else (val,):
            if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return [guard.expr for guard in n.node.shape_env.guards]
    return []


@dataclass(frozen=True, slots=True)
class Recorded:
    """The programs of a bucket's sizes, and what is known to run their stages."""

    bucket: Bucket
    programs: tuple[Program, Program, Program]
    planned: dict[int, Planned] = field(default_factory=dict)  # by step


def make_ready(size: int, now: Program, recorded: Recorded) -> None:
    """Give a program the executables of its bucket.

    Raises:
        Refused: it is another program at another size, or what is padded would be seen.
    """
    programs = (now, *recorded.programs)
    if len({len(p.steps) for p in programs}) > 1:
        raise Refused("it has not as many steps at each size")
    made = []
    for at, steps in enumerate(zip(*(p.steps for p in programs), strict=True)):
        if len({type(step) for step in steps}) > 1:
            raise Refused("its steps are others at another size")
        stages = [step for step in steps if isinstance(step, Stage)]
        if stages:
            if len({(tuple(v for v, *_ in s.inputs), s.outputs, tuple(w[:2] for w in s.written)) for s in stages}) > 1:
                raise Refused("its values go elsewhere at another size")
            streams = Streams(size, recorded.bucket, *(s.work for s in stages))
            found = recorded.planned.get(at)
            if found is None:
                nodes = streams.high.nodes
                islands = {i: ISLANDS[n.signature[0]] for i, n in enumerate(nodes) if n.signature[0] in ISLANDS}  # type: ignore[index]
                found = recorded.planned[at] = buckets.planned(streams, islands)
            made.append((stages[0], buckets.ready(streams, found), streams.high.device))
    for stage, ready, device in made:
        stage.work = replace(stage.work, device=device)  # whose executables they are
        stage.kept.keep(ready)


# ---- in blocks of rows -------------------------------------------------------------------------------------------


def is_large(program: Program) -> bool:
    """Whether a program could gain by being run in blocks of rows."""
    return any(map(lengths.is_large, _works(program)))


def templates(now: Program, before: Program) -> Templates:
    """Two programs of a graph, of different sizes, as one for any number of rows.

    Raises:
        Refused: rows depend on each other, or are not known to be apart, or something in it is not XLA's.
    """
    ours, theirs = _works(now), _works(before)
    if len(ours) != len(theirs):
        raise Refused("it has not as many stages at each size")
    found: list[Template | None] = []
    try:
        for work, other in zip(ours, theirs, strict=True):
            found.append(None if work.homes == other.homes else lengths.made(work, other))
    except (template.Refused, NodeFailed) as why:
        raise Refused(str(why)) from why
    made = [t for t in found if t is not None]
    if not made or any(t.islands or None in t.executables for t in made):
        raise Refused("something in it is not computed row by row")
    return tuple(found)


def take(known: Templates, now: Program) -> bool:
    """Give a program the executables of blocks of rows, if it is one of these and long enough to gain."""
    stages = _stages(now)
    if len(stages) != len(known):
        return False
    pairs = list(zip(stages, known, strict=True))
    if not all(t is None or (t.fits(stage.work) and t.is_worth(stage.work)) for stage, t in pairs):
        return False
    for stage, t in pairs:
        if t is None:
            stage.kept.fill(stage.work)
        else:
            stage.kept.keep(lengths.ready(t, stage.work))
    return True


def _stages(program: Program) -> list[Stage]:
    return [step for step in program.steps if isinstance(step, Stage)]


def _works(program: Program) -> list[Work]:
    return [stage.work for stage in _stages(program)]
