"""Derived programs: what a program's derivatives and its batched form compute, each a program again.

| program | takes | returns |
|---|---|---|
| `forward` | operands | results, and what the way back needs that is neither an operand nor a result |
| `backward` | what the way back needs, then cotangents | gradients |
| `pullback` | operands, then cotangents | gradients, everything computed anew from the operands |
| `tangent` | operands, then tangents | tangents of the results |
| `batched` | operands, some with one more dimension | results with one more dimension in front |

Each can be derived in turn, so derivatives of any order exist. Masks say which operands have a gradient or a tangent.
JAX's and torch's gradients of complex functions are conjugates of each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Literal

from fused_eager.fusion_rules.spec import TORCH_DTYPE

from .program import Form, Kinds, Program, avals, digest, number_avals

Mask = tuple[bool, ...]


def _is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _conj(x: Any) -> Any:
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _split(program: Program, operands: Sequence[Any], numbers: Sequence[Any], mask: Mask) -> tuple[Any, list[Any]]:
    """The program as a function of the operands in `mask` alone, with its differentiable results, all being aux."""

    def function(*moving: Any) -> tuple[list[Any], list[Any]]:
        given = iter(moving)
        full = [next(given) if m else x for m, x in zip(mask, operands, strict=True)]
        results = [jnp.asarray(r) for r in program.call(full, numbers)[0]]
        return [r for r in results if _is_differentiable(r)], results

    return function, [x for m, x in zip(mask, operands, strict=True) if m]


@dataclass(frozen=True)
class Way:
    """How a program is differentiated backward for operands of given shapes.

    `sources` say where what the way back needs is found: ("operand", i), ("result", i) or ("kept", i), which `forward`
    returns behind its results. `refusal`: why there is no such way.
    """

    forward: Program | None
    sources: tuple[tuple[str, int], ...]
    kept: Form
    results: int
    refusal: str = ""
    make: Any = None

    def backward(self, wanted: Mask) -> Program:
        """What computes gradients from what is needed and the cotangents of the results in `wanted`."""
        return self.make(wanted)


def way_back(program: Program, operands: Form, kinds: Kinds, mask: Mask) -> Way:
    """How `program` is differentiated for the operands in `mask`. Its refusal is JAX's own."""
    ways: dict[Any, Way] = program.__dict__.setdefault("_ways", {})
    key = operands, kinds, mask
    found = ways.get(key)
    if found is None:
        found = ways[key] = _way_back(program, operands, kinds, mask)
    return found


def _way_back(program: Program, operands: Form, kinds: Kinds, mask: Mask) -> Way:
    count = len(program.traced(operands, kinds).specs)  # what fails here is the user's function alone
    tree: list[Any] = [None]

    def everything(arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        function, moving = _split(program, arrays, numbers, mask)
        _, pull, results = jax.vjp(function, *moving, has_aux=True)
        leaves, tree[0] = jax.tree_util.tree_flatten(pull)
        return results, leaves

    try:
        with program.tracing():
            jaxpr = jax.make_jaxpr(everything)(list(avals(operands)), number_avals(kinds, program.x64))
    except Exception as error:
        return Way(None, (), (), count, f"{type(error).__name__}: {error}")
    needed = jaxpr.jaxpr.outvars[count:]
    dtypes = [jaxpr_dtype(v.aval) for v in needed]
    if any(d is None for d in dtypes):  # it keeps what no tensor can hold (a key of random numbers)
        return recomputed(program, len(operands), count, mask)
    places, kept = _places(jaxpr, len(operands), count)
    structure = tree[0]

    def forward(arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[list[Any], Any]:
        results, leaves = everything(arrays, numbers)
        return [*results, *[leaves[i] for i in kept]], None

    def backward(wanted: Mask) -> Program:
        def call(arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[list[Any], Any]:
            pull = jax.tree_util.tree_unflatten(structure, list(arrays[: len(needed)]))
            return _gradients(pull, arrays[len(needed) :], wanted, results), None

        results = avals(program.traced(operands, kinds).specs)
        how = ("backward", operands, kinds, mask, wanted)
        return program.derived(how, lambda: _made(program, "backward", how, call))

    how = ("forward", operands, kinds, mask)
    made = program.derived(how, lambda: _made(program, "forward", how, forward))
    forms = tuple(((tuple(needed[i].aval.shape)), dtypes[i]) for i in kept)
    return Way(made, places, forms, count, make=backward)  # type: ignore[arg-type]


def recomputed(program: Program, operands: int, count: int, mask: Mask) -> Way:
    """A way back that keeps nothing but the operands, for shapes of any size."""
    sources = tuple(("operand", i) for i in range(operands))
    return Way(program, sources, (), count, make=lambda wanted: pullback(program, mask, wanted))


def jaxpr_dtype(aval: Any) -> Any:
    """torch's dtype of a value of a trace; None if it has none."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    return TORCH_DTYPE.get(np.dtype(aval.dtype))


def _places(jaxpr: Any, operands: int, count: int) -> tuple[tuple[tuple[str, int], ...], list[int]]:
    """Where each value that the way back needs is found, and which of them have to be kept for it."""
    inputs = {v: i for i, v in enumerate(jaxpr.jaxpr.invars[:operands])}
    outputs: dict[Any, int] = {}
    for i, v in enumerate(jaxpr.jaxpr.outvars[:count]):
        if not isinstance(v, Literal):
            outputs.setdefault(v, i)
    places: list[tuple[str, int]] = []
    kept: dict[Any, int] = {}
    order: list[int] = []
    for i, v in enumerate(jaxpr.jaxpr.outvars[count:]):
        if not isinstance(v, Literal):
            if v in inputs:
                places.append(("operand", inputs[v]))
                continue
            if v in outputs:
                places.append(("result", outputs[v]))
                continue
            if v in kept:
                places.append(("kept", kept[v]))
                continue
            kept[v] = len(order)
        places.append(("kept", len(order)))
        order.append(i)
    return tuple(places), order


def _gradients(pull: Any, given: Sequence[Any], wanted: Mask, results: Sequence[Any]) -> list[Any]:
    """What JAX's pullback makes of the cotangents that there are, zeros for the others."""
    those = iter(given)
    cotangents = []
    for want, aval in zip(wanted, results, strict=True):
        ct = next(those) if want else None
        if _is_differentiable(aval):
            cotangents.append(jnp.zeros(aval.shape, aval.dtype) if ct is None else _conj(ct).astype(aval.dtype))
    return [_conj(g) for g in pull(cotangents)]


def pullback(program: Program, mask: Mask, wanted: Mask) -> Program:
    """Gradients from the operands themselves: nothing is kept, and they can be differentiated in turn."""

    def call(arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[list[Any], Any]:
        function, moving = _split(program, arrays[: len(mask)], numbers, mask)
        _, pull, results = jax.vjp(function, *moving, has_aux=True)
        return _gradients(pull, arrays[len(mask) :], wanted, results), None

    how = ("pullback", mask, wanted)
    return program.derived(how, lambda: _made(program, "pullback", how, call))


def tangent(program: Program, mask: Mask) -> Program:
    """Tangents of the results that have some, from operands and the tangents of those in `mask`."""

    def call(arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[list[Any], Any]:
        function, moving = _split(program, arrays[: len(mask)], numbers, mask)
        given = [t.astype(x.dtype) for t, x in zip(arrays[len(mask) :], moving, strict=True)]
        _, made, _ = jax.jvp(function, moving, given, has_aux=True)
        return list(made), None

    how = ("tangent", mask)
    return program.derived(how, lambda: _made(program, "tangent", how, call))


def batched(program: Program, axes: tuple[int | None, ...]) -> Program:
    """The program over one more dimension, which lies at `axes` of the operands and is the first of the results."""

    def call(arrays: Sequence[Any], numbers: Sequence[Any]) -> tuple[list[Any], Any]:
        def one(*each: Any) -> list[Any]:
            return program.call(list(each), numbers)[0]

        return list(jax.vmap(one, in_axes=axes, out_axes=0)(*arrays)), None

    how = ("batched", axes)
    return program.derived(how, lambda: _made(program, "batched", how, call))


def _made(program: Program, what: str, how: Any, call: Any) -> Program:
    recipe = f"{program.recipe},{json.dumps(_written(how), separators=(',', ':'))}" if program.recipe else ""
    return Program(f"the {what} of {program.title}", digest(program.digest, str(how)), call, program.mode, recipe)


# ---- steps, as recipes have them ---------------------------------------------------------------------------------


def _written(how: Any) -> Any:
    if isinstance(how, tuple):
        return [_written(h) for h in how]
    if isinstance(how, torch.dtype):
        return str(how)
    return how.__name__ if isinstance(how, type) else how


def _read(step: Any) -> Any:
    if isinstance(step, list):
        return tuple(_read(s) for s in step)
    if isinstance(step, str):
        return {"int": int, "float": float}.get(step) or (getattr(torch, step[6:]) if step[:6] == "torch." else step)
    return step


def step(program: Program, written: Any) -> Program | None:
    """The program that a step of a recipe makes of another one."""
    what, *how = _read(written)
    if what in ("forward", "backward"):
        operands, kinds, mask, *wanted = how
        way = way_back(program, operands, kinds, mask)
        return way.backward(*wanted) if what == "backward" and way.make is not None else way.forward
    makers: dict[str, Any] = {"pullback": pullback, "tangent": tangent, "batched": batched}
    made: Program = makers[what](program, *how)
    return made
