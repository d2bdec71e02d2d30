"""Compiling: once per key, told to the log, and never changing how the user's JAX works."""

from __future__ import annotations

import gc
import threading
import weakref

import jax
import pytest
import torch

from fused_eager import fused_eager, xla
from fused_eager.bounded import Bounded
from fused_eager.compiling import compile as compiling
from fused_eager.compiling.compile import Computation, Settings, load_or_compile
from fused_eager.executing.arguments import as_array
from fused_eager.lowering.failed import NodeFailed
from fused_eager.planning.plan import Region
from fused_eager.tracing.stream import Node
from tests.streams import END, HOME, aten, events, node


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MEMORY", Bounded(64))


def region(nodes: list[Node], output: int, donated: tuple[int, ...] = ()) -> Region:
    return Region(tuple(range(len(nodes))), (0,), (output,), donated, "xla", END)


def compiled(nodes: list[Node], output: int, donated: tuple[int, ...] = ()) -> compiling.Executable:
    made = Computation(nodes, region(nodes, output, donated), dict.fromkeys(range(9), HOME))
    return load_or_compile(made, Settings())


def run(executable: compiling.Executable, value: torch.Tensor) -> torch.Tensor:
    outputs, _ = executable.call(as_array(value), as_array(torch.empty(0).double()), as_array(torch.empty(0).long()))
    return torch.from_dlpack(outputs[0])


def test_the_executable_computes_the_region() -> None:
    x = torch.arange(8.0) - 4
    assert torch.equal(run(compiled([node(1, [0]), node(2, [1], aten.neg.default)], 2), x), -x.relu())


def test_one_compilation_per_key() -> None:
    with events("compile") as seen:
        first = compiled([node(1, [0])], 1)
        again = compiled([node(5, [0])], 5)
        other = compiled([node(1, [0], structure=7)], 1)
    assert first is again and other is not first
    assert len(seen) == 2
    assert seen[0].data["ops"] == 1 and seen[0].data["inputs"] == seen[0].data["outputs"] == 1
    assert 0 < seen[0].data["tracing"] <= seen[0].data["seconds"]


def test_threads_that_ask_at_once_share_one_compilation() -> None:
    found: list[compiling.Executable] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(30)
        found.append(compiled([node(1, [0], aten.tanh.default)], 1))

    with events("compile") as seen:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert len(seen) == 1 and len(found) == 4 and len({id(e) for e in found}) == 1


def test_a_failure_is_not_remembered_as_an_executable() -> None:
    broken = node(1, [0])
    broken.twin = None
    for _ in range(2):
        with pytest.raises(NodeFailed):
            compiled([broken], 1)
    assert not compiling.MEMORY


def test_checks_name_the_position_of_their_node() -> None:
    from tests.lowering.test_lower import embedding

    n = embedding()
    homes = {0: (torch.float32, (5, 2)), 1: (torch.int64, (4,)), 2: (torch.float32, (4, 2))}
    executable = load_or_compile(Computation([n], Region((0,), (0, 1), (2,), (), "xla", END), homes), Settings())
    assert {c.node for c in executable.checks} == {0}
    assert all(c.error == "IndexError" and c.message for c in executable.checks)


def test_names_say_where_the_ops_came_from() -> None:
    n = node(1, [0])
    n.place = (test_names_say_where_the_ops_came_from.__code__, 7)
    assert Computation([n], region([n], 1), {}).name == f"1 op from {__file__}:7"


def test_jax_keeps_nothing_of_a_region_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.11 on it would: the function, and XLA's program and executable with it, beside the one that is called."""
    traced: list[weakref.ref[object]] = []
    let_go = xla.let_go

    def noted(one: jax.stages.Traced) -> None:
        traced.append(weakref.ref(one.jaxpr))
        let_go(one)

    monkeypatch.setattr(xla, "let_go", noted)
    compiled([node(1, [0]), node(2, [1], aten.neg.default)], 2)
    gc.collect()
    assert [one() for one in traced] == [None]


def test_an_option_that_jaxlib_does_not_know_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"xla_cpu_option_of_another_version": "1"}, {"xla_cpu_experimental_ynn_fusion_type": "NO_SUCH_TYPE"}
    monkeypatch.setattr(xla, "_LIBRARIES", [*unknown, {}])
    x = torch.arange(8.0) - 4
    assert torch.equal(run(compiled([node(1, [0])], 1), x), x.relu())
    assert xla._LIBRARIES == [{}], "and the next compilation begins with what is known"
    assert torch.equal(run(compiled([node(1, [0]), node(2, [1])], 2), x), x.relu().relu())


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float64, 16_385), (torch.float32, 32_769)])
def test_sums_of_sums_of_products(dtype: torch.dtype, rows: int) -> None:
    """YNNPACK, which XLA:CPU leaves sums to if nobody objects, gets the last rows of these wrong (jax#39103)."""
    x = torch.zeros(rows, 3, dtype=dtype)
    x[:, 0] = torch.arange(rows)
    matrix = torch.eye(3, dtype=dtype)
    with fused_eager(mode="fused"):
        found = ((matrix * x[:, None, :]).sum(-1) ** 2).sum(-1)
    assert torch.equal(found, x[:, 0] ** 2)


@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_sums_of_functions_of_half_types(axes: tuple[int, ...]) -> None:
    """YNNPACK's are off by several times the result, or end the process."""
    torch.manual_seed(0)
    x = torch.randn(300, 256, 16).bfloat16()
    with fused_eager(mode="fused"):
        found = torch.nn.functional.gelu(x).sum(axes)
    exact = torch.nn.functional.gelu(x.double()).sum(axes)
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("shape", [(64,), (100, 100), (1 << 20,)], ids=str)
def test_extrema_are_nan_where_a_value_is(shape: tuple[int, ...]) -> None:
    """YNNPACK's are not, from some thousand values on."""
    x = torch.randn(shape)
    x.view(-1)[x.numel() // 3] = float("nan")
    with fused_eager(mode="fused"):
        found = [x.amin(), x.max(), (x * 2).amax(), x.min(-1).values.sum(), x.amax(0).sum()]
    assert all(value.isnan() for value in found)
