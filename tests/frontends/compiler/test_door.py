"""The compiler door as a whole: one pipeline with the first one, options, errors, shapes, threads, contexts, memory."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.effects import _get_effect

from fused_eager import BudgetExceeded, IslandRefused, expect, explain, fused_eager
from fused_eager.config import OPTIONS
from fused_eager.devices.host.buffers import TABLE
from fused_eager.executing.run import DEFERRED
from fused_eager.frontends.compiler import graphs
from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.log.events import Event

ROOT = Path(__file__).parent.parent.parent.parent
Tensor = torch.Tensor


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=compile_graph, **options)


def of(seen: list[Event], kind: str, field: str) -> list[Any]:
    return [e.data[field] for e in seen if e.kind == kind]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Dropout(0.4), nn.Linear(7, 1))


# ---- one pipeline ----


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(torch.tanh(x @ x.t() + 0.25), (6,)) * 2


def test_a_region_of_the_first_door_is_found_by_this_one(seen: list[Event]) -> None:
    x = torch.randn(6, 4)
    with torch.no_grad(), fused_eager():
        expected = normed(x)
    assert of(seen, "compile", "cause")
    seen.clear()
    with torch.no_grad():
        found = compiled(normed)(x)
    assert of(seen, "compile", "cause") == []
    assert of(seen, "flush", "reason") == ["cut.graph"]
    assert torch.equal(found, expected)


PROGRAM = """
import sys, torch
from fused_eager import fused_eager
from fused_eager.compiling.caching import keeper
from fused_eager.config import resolve
from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.log.events import LOG
from tests.frontends.compiler.test_door import normed
kinds = []
LOG.sinks.append(lambda e: kinds.append(e.kind))
x = torch.ones(6, 4)
with torch.no_grad():
    if sys.argv[1] == "context":
        with fused_eager():
            normed(x).sum(0).tolist()
            normed(x).tolist()
    else:
        torch.compile(normed, backend=compile_graph)(x)
keeper(resolve()).flush()
print(kinds.count("compile"), kinds.count("cache-load"))
"""


def test_another_process_finds_what_the_first_door_has_cached(tmp_path: Path) -> None:
    environment = {**os.environ, "FUSED_EAGER_CACHE_DIR": str(tmp_path), "FUSED_EAGER_CACHE": ""}
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, door], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        for door in ("context", "compiler")
    ]
    assert int(told[0][0]) > 0
    assert told[1] == ["0", "1"]


def test_the_backend_is_found_by_its_name(tmp_path: Path) -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    points = dict(re.findall(r'^(\w+) = "(.+)"$', section.partition("\n\n")[0], re.MULTILINE))
    assert points["fused_eager"] == "fused_eager.frontends.compiler.backend:compile_graph"
    # As an installation of the project has it.
    info = tmp_path / "stub-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stub\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines]))
    program = "import torch; print(torch.compile(lambda x: x * 2 + 1, backend='fused_eager')(torch.ones(2)).tolist())"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[3.0, 3.0]", done.stderr


def test_budgets_and_explanations_see_it(seen: list[Event]) -> None:
    f = compiled(lambda x: (x * 3).cos() + 1)
    x = torch.ones(3, 11)
    f(x)
    with expect(max_compiles=0, max_syncs=0, max_islands=0):
        f(x)
    torch._dynamo.reset()
    with pytest.raises(BudgetExceeded, match="1 region compiled"), expect(max_compiles=0):
        f(torch.ones(4, 11))
    told = explain(compiled(network().eval()), torch.randn(2, 5))
    assert set(told.syncs) == {"cut.graph"}
    assert [r.how for r in told.regions] == ["xla"]


def test_a_region_names_the_line_and_the_module(seen: list[Event]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sin()

    compiled(Net())(torch.randn(2, 5)).sum().backward()
    lines = [line for e in seen if e.kind == "plan" for r in e.data["regions"] for line in r["lines"]]
    assert {line.rpartition(":")[0] for line, *_ in lines} == {__file__}
    assert any(module.endswith("inner.0") for _, module, *_ in lines)
    assert {backward for _, _, backward, _ in lines} == {False, True}


# ---- options ----


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"options": {"cheese": 1}}, ["cheese", *OPTIONS]),
        ({"options": {"max_region": 0}}, ["max_region", "at least 1"]),
        ({"mode": "cheese"}, ["cheese", "reduce-overhead"]),
    ],
)
def test_a_wrong_option_is_refused_with_those_that_there_are(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Exception, match="OptionError") as raised:
        compiled(lambda x: x + 1, **given)(torch.ones(2))
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize("mode", ["strict", "debug", "off"])
def test_modes(mode: str, seen: list[Event]) -> None:
    x = torch.randn(3, 4)
    found = compiled(lambda x: (x * 2).tanh().sum(0), options={"mode": mode})(x)
    torch.testing.assert_close(found, (x * 2).tanh().sum(0))
    assert of(seen, "flush", "regions") == ([] if mode == "off" else [3])


def test_islands_may_be_refused() -> None:
    f: Callable[[Tensor], Any] = lambda x: torch.linalg.eigvals(x + 1)  # noqa: E731
    with pytest.raises(Exception, match=f"would run natively at {__file__}") as raised:
        compiled(f, options={"islands": "refuse"})(torch.randn(3, 3))
    assert isinstance(raised.value, IslandRefused)


@pytest.mark.parametrize("options", [{"verify": 1.0}, {"compile": "blocking"}, {"compile": "auto"}], ids=str)
def test_other_options(options: dict[str, Any]) -> None:
    m = network().eval()
    x = torch.randn(3, 5)
    torch.testing.assert_close(compiled(m, options=options)(x), m(x))


# ---- errors ----


def test_an_index_out_of_range_is_told_with_its_line_and_nothing_is_written() -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        x.add_(1)
        return x[i] * 2

    g, x = compiled(f), torch.zeros(3)
    g(x, torch.tensor([0, 2]))
    with pytest.raises(IndexError, match=f"index 7 is out of bounds.*at {__file__}:{f.__code__.co_firstlineno + 2}"):
        g(x, torch.tensor([0, 7]))
    assert x.tolist() == [1, 1, 1]
    assert g(x, torch.tensor([1])).tolist() == [4]


def test_an_island_raises_what_eager_raises() -> None:
    if _get_effect("aten::_linalg_check_errors") is None:
        pytest.skip("this torch takes the check out of every graph: torch 2.13 has it there first")
    before = set(TABLE)  # another test's lost value may still be there
    f = compiled(lambda x: torch.linalg.cholesky(x.sin()) * 2)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        f(-torch.eye(3))
    assert set(TABLE) <= before


# ---- shapes ----


def test_each_form_is_compiled_up_to_a_bound_and_the_log_says_why(
    seen: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "FORMS", 3)
    f: Callable[[Tensor], Tensor] = lambda x: torch.sort(x * 1.5, 0)[0] * x.shape[0]  # noqa: E731
    g = compiled(f, dynamic=True)
    for n in [3, 4, 5, 6, 7, 4, 8]:
        x = torch.randn(n, 13)
        torch.testing.assert_close(g(x), f(x))
    forms = [e.data for e in seen if e.kind == "graph"]
    assert [d["forms"] for d in forms] == [1, 2, 3]
    assert ["argument 0", "(<class 'int'>, 3)", "(<class 'int'>, 4)"] in forms[1]["changes"]
    assert [bool(d["unfit"]) for d in forms] == [False, False, True]
    assert of(seen, "flush", "reason").count("cut.graph") == 4


def test_training_with_dynamic_shapes_has_gradients_and_numbers_of_eager() -> None:
    m = network()
    g = compiled(m, dynamic=True)
    for n in (3, 4):
        x = torch.randn(n, 5)
        found = []
        for call in (m, g):
            torch.manual_seed(1)
            found.append(torch.autograd.grad(call(x).sum(), list(m.parameters())))
        torch.testing.assert_close(found[1], found[0])


def test_a_number_that_counts_on_compiles_nothing_new(seen: list[Event]) -> None:
    g, x = compiled(lambda x, n: x.sin() * n, dynamic=True), torch.ones(3, 17)
    for n in range(2, 2 + 2 * graphs.FORMS):
        torch.testing.assert_close(g(x, n), x.sin() * n)
    assert len(of(seen, "compile", "cause")) == 1


def test_a_graph_that_reads_values_runs_op_by_op_and_says_so(seen: list[Event]) -> None:
    f: Callable[[Tensor], Any] = lambda x: (x * x.sum().item(), x.nonzero().float() * 2)  # noqa: E731
    x = torch.randn(4)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(f, fullgraph=True)(x), f(x))
    assert "known only when it has run" in of(seen, "graph", "unfit")[0]


# ---- what is around it ----


def test_a_custom_op_runs_between_two_stages_and_may_write(seen: list[Event]) -> None:
    @torch.library.custom_op("fused_eager_tests::scale", mutates_args=())
    def scale(x: Tensor, k: float) -> Tensor:
        return x.clone() * k

    @torch.library.custom_op("fused_eager_tests::fill", mutates_args=("x",))
    def fill(x: Tensor, k: float) -> None:
        x.fill_(k)

    scale.register_fake(lambda x, k: torch.empty_like(x))

    def f(x: Tensor) -> Tensor:
        y = scale(x.sin(), 2.0).cos()
        z = y.clone()
        fill(z, 3.0)
        fill(x, 1.5)
        return y + z

    x = torch.randn(4)
    w = x.clone()
    torch.testing.assert_close(compiled(f, fullgraph=True)(x), f(w))
    assert torch.equal(x, w)
    assert "fused_eager_tests.scale.default" in of(seen, "island", "op")


def test_control_flow_checkpoints_and_transforms() -> None:
    m = network()

    def f(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        y = y + torch.func.vmap(torch.func.grad(lambda v: (v.sin() * v).sum()))(x)
        return y + torch.utils.checkpoint.checkpoint(m, y, use_reentrant=False)

    for sign in (1, -1):
        found = []
        for call in (f, compiled(f, fullgraph=True)):
            torch.manual_seed(0)
            x = (torch.ones(3, 5) * sign).requires_grad_()
            y = call(x)
            found.append((y.detach(), torch.autograd.grad(y.sum(), [x, *m.parameters()])))
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD], ids=lambda o: o.__name__)
def test_an_optimizer_step_is_one_region_and_writes_in_place(make: Any, seen: list[Event]) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        m = network().eval()
        optimizer = make(m.parameters(), lr=0.1)
        step = compiled(lambda optimizer=optimizer: optimizer.step()) if compiles else optimizer.step
        places = [p.data_ptr() for p in m.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            m(torch.ones(2, 5)).sum().backward()
            step()
        assert places == [p.data_ptr() for p in m.parameters()]
        found.append([p.detach() for p in m.parameters()])
    torch.testing.assert_close(found[1], found[0])
    assert set(of(seen, "flush", "regions")) == {1}


def test_inside_a_context_it_does_what_it_does_outside(seen: list[Event]) -> None:
    m = nn.Linear(4, 4)
    g, x = compiled(m), torch.randn(4, 4)
    loss = g(x).sum()
    with fused_eager():
        y = g(x + 1) * 2  # of a pending value; what comes of it is used by what is recorded
        loss.backward()  # and a graph's backward pass
        grad = m.weight.grad * 2  # type: ignore[operator]
    torch.testing.assert_close(y, m(x + 1) * 2)
    torch.testing.assert_close(grad, torch.full((4, 4), 2.0) * x.sum(0))


def test_threads() -> None:
    m = network().eval()
    g, xs = compiled(m), [torch.randn(4, 5) for _ in range(6)]
    g(xs[0]).sum().backward()
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(10):
            found[i] = torch.autograd.grad(g(xs[i]).sum(), list(m.parameters()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, x in enumerate(xs):
        torch.testing.assert_close(found[i], torch.autograd.grad(m(x).sum(), list(m.parameters())))


def test_a_compiled_function_leaves_nothing_behind() -> None:
    def graphs_alive() -> int:
        gc.collect()
        return sum(type(o) is graphs.CompiledGraph for o in gc.get_objects())

    before, table = graphs_alive(), set(TABLE)
    m = network()
    g = compiled(m)
    x = torch.randn(3, 5)
    g(x).sum().backward()
    weights = [weakref.ref(p) for p in m.parameters()]
    del m, g
    torch._dynamo.reset()
    assert graphs_alive() == before
    assert [w() for w in weights] == [None] * len(weights)
    assert set(TABLE) <= table
    assert not DEFERRED.launches


def test_results_are_ordinary_tensors() -> None:
    y = compiled(lambda x: x.sin())(torch.ones(4))
    assert (y._is_view(), y._version) == (False, 0)
    y.resize_(40)
    m = nn.Linear(3, 3)
    g, x = compiled(m), torch.randn(2, 3)
    with torch.inference_mode():
        assert g(x).is_inference()
    with torch.no_grad():
        assert not g(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(g(x), m(x))


def test_subclasses_and_sparse_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    t = compiled(lambda x: x * 2 + 1)(TwoTensor(torch.ones(3), torch.zeros(3)))
    assert (type(t), t.a.tolist(), t.b.tolist()) == (TwoTensor, [3] * 3, [1] * 3)
    s, x = torch.eye(3).to_sparse(), torch.randn(3, 2)
    torch.testing.assert_close(compiled(lambda s, x: torch.sparse.mm(s, x) * 2)(s, x), x * 2)


def test_quantized_tensors_and_what_comes_of_them() -> None:
    def f(x: Tensor) -> Any:
        q = torch.quantize_per_tensor(x + 1, 0.1, 0, torch.qint8)
        return q, torch.relu(q).dequantize() * 2, q.int_repr() + 1

    for x in (torch.randn(3, 4), torch.randn(3, 4)):
        for found, wanted in zip(compiled(f)(x), f(x), strict=True):
            assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
            torch.testing.assert_close(*((t.dequantize() if t.is_quantized else t) for t in (found, wanted)))


def test_an_op_that_returns_another_dtype_than_it_has_promised_is_found_out() -> None:
    @torch.library.custom_op("fused_eager_tests::lies", mutates_args=())
    def lies(x: Tensor) -> Tensor:
        return x.double()

    lies.register_fake(torch.empty_like)
    with pytest.raises(RuntimeError, match=r"lies.default returned torch.float64\[3\] .* promised torch.float32\[3\]"):
        compiled(lambda x: lies(x) + 1)(torch.ones(3))


def test_memory_that_is_counted_from_the_storage_may_begin_elsewhere_in_the_next_call() -> None:
    g = compiled(lambda x: x.as_strided((3,), (2,), 5) * 2)
    base = torch.arange(60.0)
    for start in (0, 3, 0, 8):  # nothing of Dynamo's looks at where a tensor begins
        x = base[start : start + 20]
        assert g(x).tolist() == (x.as_strided((3,), (2,), 5) * 2).tolist()


def test_a_forked_child_runs_torchs_ops_and_does_not_hang() -> None:
    program = """
import os, torch
from fused_eager.frontends.compiler.backend import compile_graph
f = torch.compile(lambda x: (x * 2).tanh() + 1, backend=compile_graph)
g = torch.compile(lambda x: (x * 3).cos(), backend=compile_graph)
x = torch.arange(5.0, requires_grad=True)
f(x).sum().backward()
pid = os.fork()
if pid == 0:
    y = f(x)
    y.sum().backward()
    alike = torch.allclose(y, (x * 2).tanh() + 1) and torch.allclose(g(x), (x * 3).cos())
    gradient = 4 * (1 - (x * 2).tanh() ** 2)
    os._exit(0 if alike and torch.allclose(x.grad, gradient, atol=1e-5) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
