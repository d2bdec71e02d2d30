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
from fused_eager.fusion_rules.padded import Refused
from fused_eager.fusion_rules.platforms import ANY, lowering_for
from fused_eager.fusion_rules.spec import JAX_DTYPE

from ...compiling.key import Computation
from ...errors import ExportError
from ...executing.arguments import hoisted
from ...log.reasons import Reason
from ...log.site import describe
from ...lowering.failed import NodeFailed
from ...lowering.lower import Function
from ...planning.plan import Region
from ...xla import enable_x64
from ..kernels.platforms import lowering_rules
from .program import Call, Program
from .stage import Stage
from .templates import Fetch, mapped


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

    def numbers(self) -> tuple[list[float], list[int]]:
        """The Python numbers that it computes with."""
        return ([], []) if self.stage is None else hoisted(self.stage.work.nodes, self.region)

    def __call__(self, arrays: dict[int, jax.Array], numbers: tuple[Any, Any] | None = None) -> list[Any]:
        """Its results, from the arrays of its slots, and with other numbers if they are given.

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
            floats, ints = numbers or self.numbers()
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


def exported(
    function: Callable[[list[Any], list[Any]], Any],
    weights: Sequence[jax.ShapeDtypeStruct],
    inputs: Sequence[jax.ShapeDtypeStruct],
    platforms: Sequence[str],
    varies: bool,
) -> tuple[bytes, Sequence[Any]]:
    """The bytes of `function(weights, inputs)` as `jax.export` writes them, and the forms of its results.

    Where sizes vary it is lowered for all platforms alike: what one has for itself may depend on the sizes.

    Raises:
        ExportError: it cannot be compiled for one of the platforms.
    """
    from jax import export

    with enable_x64(True), lowering_for(platforms[0] if len(platforms) == 1 and not varies else ANY):
        try:
            rules = lowering_rules() if len(platforms) > 1 else None
            writing = export.export(jax.jit(function), platforms=tuple(platforms), _override_lowering_rules=rules)
            made = writing(list(weights), list(inputs))
        except (ExportError, Refused):
            raise
        except Exception as error:
            raise ExportError(f"JAX does not export it for {', '.join(platforms)}: {error}") from error
        try:
            return bytes(made.serialize()), made.out_avals
        except ImportError as error:
            raise ExportError("jax writes programs with flatbuffers: pip install fused-eager[export]") from error


def struct(t: torch.Tensor) -> jax.ShapeDtypeStruct:
    """A tensor's shape and dtype in JAX's words."""
    return jax.ShapeDtypeStruct(tuple(t.shape), JAX_DTYPE[t.dtype])
