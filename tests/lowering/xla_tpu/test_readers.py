"""In which shape the results of a region are read, and what XLA:TPU makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.platforms import lowering_for
from fused_eager.fusion_rules.spec import Spec, contiguous_strides

from fused_eager.lowering.lower import Function
from fused_eager.lowering.xla_tpu.readers import Readers
from fused_eager.planning.plan import Region
from fused_eager.tracing.stream import Node, Result, Use
from fused_eager.xla import enable_x64, jax
from tests.fusion_rules.xla_tpu.for_a_tpu import kernels_in, needs_its_compiler
from tests.streams import CPU, END, aten, node

F32 = torch.float32
SHAPES = {0: (5,), 1: (6, 4), 2: (4, 5)}


def view(*shape: int, offset: int = 0) -> Geometry:
    return Geometry(shape, contiguous_strides(shape), offset, F32)


def reading(made: int, op: object, *reads: tuple[int, Geometry], shape: tuple[int, ...]) -> Node:
    uses = tuple(Use(v, g) for v, g in reads)
    spec = Spec(shape, F32, contiguous_strides(shape), CPU)
    result = Result(made, (F32, shape), view(*shape), None, spec)
    found = node(made, [v for v, _ in reads], op)
    found.uses, found.results = uses, (result,)
    return found


def linear(*readers: Geometry) -> list[Node]:
    """A product of `[6, 4]` and `[4, 5]` with a bias, and ops that read it."""
    made = reading(3, aten.addmm.default, *((v, view(*shape)) for v, shape in SHAPES.items()), shape=(6, 5))
    return [made, *(reading(4 + k, aten.relu.default, (3, g), shape=g.size) for k, g in enumerate(readers))]


def region(nodes: list[Node]) -> Region:
    return Region(tuple(range(len(nodes))), tuple(SHAPES), tuple(n.results[0].vid for n in nodes), (), "xla", END)


@pytest.mark.parametrize(
    ("readers", "expected"),
    [
        ([view(2, 3, 5)], (2, 3, 5)),
        ([view(2, 3, 5), view(2, 3, 5)], (2, 3, 5)),
        ([view(6, 5)], (6, 5)),
        ([], None),
        ([view(2, 3, 5), view(6, 5)], None),  # they differ
        ([view(3, 5)], None),  # a part
        ([view(3, 5, offset=15)], None),
        ([Geometry((2, 3, 5), (15, 1, 3), 0, F32)], None),  # in another order
    ],
)
def test_the_shape_in_which_all_see_the_whole(readers: list[Geometry], expected: tuple[int, ...] | None) -> None:
    nodes = linear(*readers)
    assert Readers(nodes, region(nodes)).read_as(nodes[0]) == expected


@pytest.mark.parametrize("readers", [[view(2, 3, 5)], [view(30)], [view(6, 5), view(2, 15)], [view(2, 3, 5, 1)]])
def test_values_are_the_same_in_whatever_shape_the_bias_is_added(readers: list[Geometry]) -> None:
    nodes = linear(*readers)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]

    def run() -> list[np.ndarray]:
        with enable_x64(True):
            outputs, _ = jax.jit(Function(nodes, region(nodes), True))(*given, np.zeros(0), np.zeros(0, np.int64))
        return [np.asarray(x) for x in outputs]

    plain = run()
    with lowering_for("tpu"):
        for here, there in zip(plain, run(), strict=True):
            np.testing.assert_array_equal(here, there)


@needs_its_compiler
def test_a_linear_layer_is_fused_with_what_follows_it() -> None:
    """Bias, residual and the sums of a layer norm, with the product: three loops, and four were it in two shapes."""
    program = """
import numpy as np, jax.numpy as jnp
from fused_eager.fusion_rules.lower_matmul import addmm
from fused_eager.fusion_rules.lowering import Context, Places
form = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=place)
def layer(read_as):
    def run(x, w, b, residual):
        y = addmm(Context((), places=Places(read_as=read_as)), b, x.reshape(1024, 1024), w.T).reshape(8, 128, 256)
        y = y + residual
        mean = y.mean(-1, keepdims=True)
        return y, ((y - mean) ** 2).mean(-1)
    with tracing_for(device):
        made = jax.jit(run).lower(form(8, 128, 1024), form(256, 1024), form(256), form(8, 128, 256)).compile()
    text = made.as_text()
    return text[text.index("ENTRY"):].count(" fusion(")
print(layer((8, 128, 256)), layer(None))
"""
    found = kernels_in(program)
    assert int(found[0]) < int(found[1]), found
