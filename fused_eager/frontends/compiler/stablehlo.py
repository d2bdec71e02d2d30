"""StableHLO: a recorded program as one JAX function of arrays as a user sees them, and its export.

The function is the one that regions are compiled from. Around it values change their form: a region takes and makes
homes, a user has arrays of a shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from fused_eager.fusion_rules import precision
from fused_eager.fusion_rules.geometry import Geometry, read, reinterpret
from fused_eager.fusion_rules.platforms import ANY, lowering_for
from fused_eager.fusion_rules.rowwise import MAKERS, Rows, params_of_block
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ...compiling.compile import trace
from ...compiling.key import Computation
from ...errors import ExportError
from ...log.reasons import Reason
from ...log.site import describe
from ...lowering.failed import NodeFailed
from ...lowering.lower import Function
from ...lowering.straight_line import Numbering, Step, flatten
from ...lowering.straight_line import Program as Flat
from ...planning.plan import Region
from ...running.arguments import hoisted
from ...xla import enable_x64
from .program import Call, Fetch, Program, Stage, mapped


class Iteration:
    """A recorded program that is one region: `arrays` are what its arguments and constants are, in order of slots."""

    def __init__(self, program: Program):
        self.allocated: dict[int, Geometry] = {}  # slots of memory that nobody has written: zeros here
        for step in program.steps:
            if isinstance(step, Call) and step.target is torch.empty_strided:
                size, strides = step.args
                self.allocated[step.made[0].slot] = Geometry(size, strides, 0, step.kwargs["dtype"])
            elif isinstance(step, Call):
                raise ExportError(
                    f"{step.target} cannot be exported: it draws random numbers, or only torch can run it"
                )
        stages = [step for step in program.steps if isinstance(step, Stage)]
        if len(stages) > 1:
            raise ExportError("the program is not one graph of ops")
        self.program = program
        self.stage = stages[0] if stages else None
        if self.stage is not None:
            self.ends = [*self.stage.outputs, *[(vid, slot) for vid, slot, _ in self.stage.written]]
            if any(slot not in self.allocated for _, slot, _ in self.stage.written):
                raise ExportError("the program writes its arguments, which arrays of JAX's cannot show")
            inputs = tuple(vid for vid, *_ in self.stage.inputs)
            outputs = tuple(vid for vid, _ in self.ends)
            nodes = tuple(range(len(self.stage.work.nodes)))
            self.region = Region(nodes, inputs, outputs, (), "xla", Reason("cut.graph"))

    def computation(self) -> Computation:
        """What is compiled of it."""
        assert self.stage is not None
        return Computation(self.stage.work.nodes, self.region, self.stage.work.homes)

    def __call__(self, arrays: dict[int, jax.Array]) -> list[Any]:
        """Its results, from the arrays of its slots.

        Raises:
            ExportError: an op has no lowering.
        """
        held = dict(arrays)
        for slot, g in self.allocated.items():
            reach = 1 + sum((n - 1) * s for n, s in zip(g.size, g.stride, strict=True)) if 0 not in g.size else 0
            held[slot] = jax.numpy.zeros(reach, JAX_DTYPE[g.dtype])
        if self.stage is not None:
            work = self.stage.work
            homes = [_home(held[slot], home, start) for _, home, slot, start in self.stage.inputs]
            floats, ints = hoisted(work.nodes, self.region)
            try:
                with precision.as_of(work.switches):
                    made, _ = Function(work.nodes, self.region, False)(
                        *homes, jax.numpy.asarray(floats, "float64"), jax.numpy.asarray(ints, "int64")
                    )
            except NodeFailed as failed:
                node = work.nodes[failed.index]
                where = f"{node.op} at {describe(node.place)}"
                raise ExportError(f"{where} cannot be exported: {failed.reason}") from failed
            held.update({slot: home for (_, slot), home in zip(self.ends, made, strict=True)})

        def leaf(a: Any) -> Any:
            if not isinstance(a, Fetch):
                return a
            geometry = a.geometry or self.allocated.get(a.slot)
            return held[a.slot] if geometry is None else read(held[a.slot], geometry)

        result = self.program.result
        return [mapped(leaf, a) for a in (result if isinstance(result, (tuple, list)) else (result,))]


def _home(x: jax.Array, home: Any, start: int) -> jax.Array:
    dtype, shape = home
    flat = reinterpret(x.reshape(-1), dtype)
    begin = start // dtype.itemsize
    return flat[begin : begin + math.prod(shape)].reshape(shape)


def rows_are_apart(whole: Iteration, block: Iteration, count: int, size: int) -> str:
    """Why a program recorded for `size` rows does not compute what it computes of `count`, for each block; "" if it is
    proved to. As with streams of any length (`compiling.lengths`), from what is traced, and not by trying."""
    if whole.stage is None or block.stage is None:
        return "it computes nothing"
    rows = Rows((count,), size)
    try:
        with precision.as_of(whole.stage.work.switches):
            every, some = (flatten(trace(w.computation(), False, ANY)) for w in (whole, block))
    except NodeFailed as failed:
        return failed.reason
    by_rows = {v for v in (*every.inputs, *every.constants) if rows.axes(every.avals[v].shape)}
    params: dict[int, Any] = {}
    for step in every.steps:
        taken = [every.avals[v].shape for v in step.values if v in by_rows]
        if taken or step.eqn.primitive.name in MAKERS:
            found = _params(rows, every, step, by_rows, taken)
            if found is not None:
                params[id(step)] = found
                by_rows.update(step.outputs)
            elif taken:
                return f"rows depend on each other ({step.eqn.primitive.name})"
    sizes = [(every.avals[v].shape, v in by_rows) for v in every.inputs]
    if [rows.of_block(s) if by_rows else s for s, by_rows in sizes] != [some.avals[v].shape for v in some.inputs]:
        return "something else has as many rows"
    results = every.outputs[: len(whole.region.outputs)]
    if not {v for v in results if type(v) is int} <= by_rows:
        return "a result is not by rows"
    numbering = Numbering()
    if numbering.of(every, params)[: len(results)] != numbering.of(some, {})[: len(results)]:
        return "a block is not computed as all rows are"
    return ""


def _params(rows: Rows, program: Flat, step: Step, by_rows: set[int], taken: list[Any]) -> Any:
    """The parameters with which a step computes a block of rows; None if it mixes rows, or nothing is known."""
    eqn = step.eqn
    of = [v in by_rows if type(v) is int else False for v in step.inputs]
    if eqn.primitive.name == "dot_general":
        (left, _), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        alone = of == [True, False] and not left_batch and 0 not in left
        both = of == [True, True] and left_batch[:1] == right_batch[:1] == (0,)
        return dict(eqn.params) if alone or both else None
    if eqn.primitive.name == "conv_general_dilated":
        form = eqn.params["dimension_numbers"]
        apart = of == [True, False] and form.lhs_spec[0] == form.out_spec[0] == 0
        return dict(eqn.params) if apart and eqn.params["batch_group_count"] == 1 else None
    if eqn.primitive.name == "transpose" and rows.axes(taken[0]) == 1:
        return dict(eqn.params) if eqn.params["permutation"][0] == 0 else None
    if eqn.primitive.name.startswith("reduce_window") and rows.axes(taken[0]) == 1 and len(taken) == len(of):
        one = [eqn.params[name][0] for name in ("window_dimensions", "window_strides", "base_dilation")]
        return dict(eqn.params) if one == [1, 1, 1] and tuple(eqn.params["padding"][0]) == (0, 0) else None
    return None if step.eqn.effects else params_of_block(rows, eqn, step.shape, taken)


def exported(
    function: Callable[[list[Any], list[Any]], Any],
    weights: Sequence[jax.ShapeDtypeStruct],
    inputs: Sequence[jax.ShapeDtypeStruct],
    platforms: Sequence[str],
) -> bytes:
    """The bytes of `function(weights, inputs)` as `jax.export` writes them.

    Raises:
        ExportError: it cannot be compiled for one of the platforms.
    """
    from jax import export

    with enable_x64(True), lowering_for(platforms[0] if len(platforms) == 1 else ANY):
        try:
            made = export.export(jax.jit(function), platforms=tuple(platforms))(list(weights), list(inputs))
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(f"JAX does not export it for {', '.join(platforms)}: {error}") from error
        try:
            return bytes(made.serialize())
        except ImportError as error:
            raise ExportError("jax writes programs with flatbuffers: pip install fused-eager[export]") from error


def struct(t: torch.Tensor) -> jax.ShapeDtypeStruct:
    """A tensor's shape and dtype in JAX's words."""
    return jax.ShapeDtypeStruct(tuple(t.shape), JAX_DTYPE[t.dtype])
