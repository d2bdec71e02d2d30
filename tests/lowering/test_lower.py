"""Lowering a region: one traceable function over the homes of its inputs, with numbers and checks as data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.lowering import EXCEPTIONS, Context, LoweringError
from fused_eager.fusion_rules.spec import Spec

from fused_eager.lowering.lower import Function, NodeFailed
from fused_eager.planning.plan import Region
from fused_eager.tracing.stream import Hole, Node, Ref, Result, Use
from fused_eager.xla import enable_x64
from tests.streams import CPU, END, HOME, aten, geometry, lowered_by, node

X = np.arange(8, dtype=np.float32) - 3


def call(
    nodes: list[Node],
    inputs: dict[int, np.ndarray],
    outputs: list[int],
    floats: list[float] | None = None,
    bounds: bool = True,
) -> tuple[list[np.ndarray], np.ndarray, Function]:
    """Trace and run the nodes as one region."""
    region = Region(tuple(range(len(nodes))), tuple(inputs), tuple(outputs), (), "xla", END)
    function = Function(nodes, region, bounds)
    with enable_x64(True):
        numbers = np.asarray(floats or [], np.float64)
        done, flags = jax.jit(function)(*inputs.values(), numbers, np.zeros(0, np.int64))
    return [np.asarray(d) for d in done], np.asarray(flags), function


def test_values_flow_from_node_to_node() -> None:
    outputs, flags, _ = call([node(1, [0]), node(2, [1], aten.neg.default)], {0: X}, [1, 2])
    assert (outputs[0] == np.maximum(X, 0)).all() and (outputs[1] == -np.maximum(X, 0)).all()
    assert flags.shape[1] == 2 and flags.dtype == np.int64 and not flags[:, 0].any()


def test_only_a_row_that_may_raise_asks_for_checks() -> None:
    def lower(cx: Context, self: jax.Array) -> jax.Array:
        cx.check((self > 4).any(), "RuntimeError", "too large")
        return self

    with lowered_by("aten.relu.default", lower), pytest.raises(NodeFailed, match="does not say that it may raise"):
        call([node(1, [0])], {0: X}, [1])


def test_a_check_raises_what_eager_can_raise() -> None:
    cx = Context(())
    for name, kind in EXCEPTIONS.items():
        cx.check(jnp.asarray(True), name, "bad")
        assert issubclass(kind, Exception)
    with pytest.raises(LoweringError, match="cannot raise LinAlgError"):
        cx.check(jnp.asarray(True), "LinAlgError", "bad")


def scaled(made: int, read: int) -> Node:
    """`read * number`."""
    plain = node(made, [read], aten.mul.Tensor, scalars=[0.0])
    plain.args = [Ref(0), Hole(0, float)]
    return plain


def test_hoisted_numbers_come_in_the_order_of_the_nodes() -> None:
    outputs, _, _ = call([scaled(1, 0), scaled(2, 0)], {0: X}, [1, 2], floats=[2.0, -0.5])
    assert (outputs[0] == X * 2).all() and (outputs[1] == X * np.float32(-0.5)).all()


def test_a_write_through_a_view_keeps_the_rest() -> None:
    g = Geometry((3,), (2,), 1, torch.float32)
    spec = Spec(g.size, g.dtype, g.stride, CPU)
    write = Node(
        0, aten.neg_.default, aten.neg.default, [Ref(0)], {}, (Use(0, g),), [],
        (Result(1, HOME, g, 0, spec),), (0,), (0,), None,
    )  # fmt: skip
    (out,), _, _ = call([write], {0: X}, [1])
    expected = X.copy()
    expected[1:6:2] *= -1
    assert (out == expected).all()


def embedding() -> Node:
    g, table = geometry(4, torch.int64), Geometry((5, 2), (2, 1), 0, torch.float32)
    out = Geometry((4, 2), (2, 1), 0, torch.float32)
    spec = Spec(out.size, out.dtype, out.stride, CPU)
    result = Result(2, (torch.float32, (4, 2)), out, None, spec)
    op = aten.embedding.default
    return Node(0, op, op, [Ref(0), Ref(1)], {}, (Use(0, table), Use(1, g)), [], (result,), (), (0,), None)


@pytest.mark.parametrize(("ids", "bad"), [([0, 4, 2, 1], 0), ([0, 7, 2, 1], 1), ([0, 1, 2, -9], 1)])
def test_checks_become_rows_of_the_flags(ids: list[int], bad: int) -> None:
    table = np.ones((5, 2), np.float32)
    _, flags, function = call([embedding()], {0: table, 1: np.asarray(ids)}, [2])
    assert len(function.checks) == len(flags) >= 1
    assert function.checks[0][0] == 0 and function.checks[0][1].error == "IndexError"
    assert flags[:, 0].any() == bool(bad)
    if bad:
        assert flags[flags[:, 0] == 1][0, 1] in ids


def test_without_bounds_there_are_no_checks() -> None:
    _, flags, function = call([embedding()], {0: np.ones((5, 2), np.float32), 1: np.arange(4)}, [2], bounds=False)
    assert not function.checks and flags.shape == (1, 2) and not flags.any()


def test_a_node_that_cannot_be_lowered_says_which_and_why() -> None:
    @torch.library.custom_op("lower_test::plain", mutates_args=())
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(NodeFailed) as failed:
        call([node(1, [0]), node(2, [1], torch.ops.lower_test.plain.default)], {0: X}, [2])
    assert failed.value.index == 1 and failed.value.reason

    orphan = node(1, [0])
    orphan.twin = None
    with pytest.raises(NodeFailed, match="no functional overload"):
        call([orphan], {0: X}, [1])


def test_a_lowering_that_breaks_its_contract_is_reported_not_broadcast() -> None:
    wrong = node(1, [0], home=(torch.float32, (3,)))
    wrong.uses = (Use(0, geometry(8)),)
    with pytest.raises(NodeFailed, match="shape"):
        call([wrong], {0: X}, [1])


def test_the_user_s_own_jax_keeps_its_precision() -> None:
    call([node(1, [0])], {0: X}, [1])
    assert jax.numpy.arange(3).dtype == np.int32
