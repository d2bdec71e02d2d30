"""One op in every way of running: at once, strict, debug, fused, compiled by Dynamo, exported, cold and warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils import _pytree

from fused_eager import expect, explain, fused_eager, jax_op, sync
from fused_eager.log.events import LOG

from .functions import FUNCTIONS

Tensor = torch.Tensor
ROOT = Path(__file__).resolve().parents[3]


def step(op: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """An op between others, and its gradients."""
    leaves, spec = _pytree.tree_flatten(args)
    made = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for x in leaves]
    tensors = [x for x in made if isinstance(x, Tensor)]
    moved = _pytree.tree_unflatten([x * 1.25 if isinstance(x, Tensor) else x for x in made], spec)
    out = [t.sin() * 2 for t in _pytree.tree_leaves(op(*moved))]
    gradients = torch.autograd.grad([t.sum() for t in out], tensors)
    return [t.detach() for t in (*out, *gradients)]


@pytest.mark.thinned(21)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_numbers_in_every_mode(name: str, dtype: torch.dtype) -> None:
    op, arguments = FUNCTIONS[name]
    args = _pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) else x, arguments(dtype))
    plain = step(op, args)
    assert all(t.dtype == dtype for t in plain)
    for mode in ("strict", "debug", "fused"):
        with fused_eager(mode=mode):
            for _ in range(2):
                found = step(op, args)
        for a, b in zip(plain, found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["scaled", "two_results", "scanned"])
@pytest.mark.parametrize(
    "how", [{"compile": "auto"}, {"compile": "auto", "native": "measured"}, {"deterministic": True}]
)
def test_the_same_numbers_while_it_is_not_compiled_yet_and_after(name: str, how: dict[str, Any]) -> None:
    op, arguments = FUNCTIONS[name]
    args = arguments(torch.float32)
    plain = step(op, args)
    with fused_eager(**how):
        for turn in range(6):
            found = step(op, args)
            if turn % 2:
                sync(compiled=True)
            for a, b in zip(plain, found, strict=True):
                torch.testing.assert_close(a, b)


def test_it_is_fused_with_its_neighbours() -> None:
    scaled, _ = FUNCTIONS["scaled"]
    x = torch.randn(4, 4)
    seen = explain(lambda: scaled(x * 2, 3.0) + 1)
    assert [len(r.lines) for r in seen.regions] == [1]
    assert "mul.Tensor, kernel_tests.scaled.call, add.Tensor" in str(seen)
    with fused_eager(islands="refuse"):
        y = scaled(x * 2, 3.0) + 1
    torch.testing.assert_close(y, torch.tanh(x * 2) * 3 + 1)


def test_another_number_is_no_other_compilation_and_another_static_one_is() -> None:
    scaled, counted = FUNCTIONS["scaled"][0], FUNCTIONS["counted"][0]
    x = torch.randn(3)
    found = []
    with fused_eager():
        (scaled(x, 1.0) + 1).tolist()
        with expect(max_compiles=0):
            for s in (2.0, -0.5, float("inf")):
                found.append((scaled(x, s) + 1).tolist())
        for n in (1, 2):
            found.append((counted(x, n) + 1).tolist())
    once = torch.cos(x) * x + x
    wanted = [*[torch.tanh(x) * s for s in (2.0, -0.5, float("inf"))], once, torch.cos(once) * x + once]
    torch.testing.assert_close(torch.tensor(found), torch.stack(wanted) + 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fused_eager"])
def test_dynamo_compiles_it_with_sizes_that_change(backend: str) -> None:
    op, arguments = FUNCTIONS["rms_norm"]
    x, w, eps = arguments(torch.float32)
    x.requires_grad_()

    def function(x: Tensor) -> Tensor:
        return op(x * 2, w, eps).sin()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for rows in (4, 5, 7):
            given = x.detach().repeat(rows, 1).requires_grad_()
            out = compiled(given)
            torch.testing.assert_close(out, function(given))
            torch.testing.assert_close(*[torch.autograd.grad(f(given).sum(), given)[0] for f in (compiled, function)])


def test_it_is_exported_with_a_dynamic_size() -> None:
    op, arguments = FUNCTIONS["rms_norm"]
    x, w, eps = arguments(torch.float32)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x * 2, w, eps).sin()

    program = torch.export.export(Module(), (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    lowered = program.run_decompositions()
    assert "kernel_tests.rms_norm.call" in {str(n.target) for n in lowered.graph.nodes}
    for rows in (3, 8):
        given = torch.randn(rows, x.shape[1])
        torch.testing.assert_close(lowered.module()(given), op(given * 2, w, eps).sin())


def test_torch_checks_it() -> None:
    x, s = FUNCTIONS["scaled"][1](torch.float32)
    torch.library.opcheck(torch.ops.kernel_tests.scaled.default, (x.requires_grad_(), s))


def test_where_a_size_decides_it_is_specialised_and_that_is_told() -> None:
    @jax_op("kernel_tests::by_size")
    def by_size(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, x]) if x.shape[0] > 4 else x[:2]

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: by_size(x) + 1, backend="eager", dynamic=True, fullgraph=True)
    for rows in (3, 6, 4):
        x = torch.randn(rows)
        torch.testing.assert_close(compiled(x), by_size(x) + 1)
    assert any("kernel_tests::by_size is specialised to its sizes" in name for name in LOG.counts)


def test_threads_share_one_op() -> None:
    op, arguments = FUNCTIONS["rms_norm"]
    x, w, eps = arguments(torch.float32)
    wrong: list[Any] = []

    def work(rows: int) -> None:
        try:
            given = torch.randn(rows, x.shape[1])
            expected = given * torch.rsqrt((given * given).mean(-1, keepdim=True) + eps) * w
            for mode in ("off", "fused", "strict"):
                with fused_eager(mode=mode):
                    found = op(given, w, eps)
                torch.testing.assert_close(found, expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(2 + i % 3,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not wrong


PROGRAM = """
import sys; sys.path.insert(0, {folder!r})
import json, torch, kernels_here
from fused_eager import fused_eager
from fused_eager.compiling.caching import keeper
from fused_eager.config import resolve
from fused_eager.log.events import LOG
x = torch.linspace(0, 1, 12).reshape(3, 4).requires_grad_()
y = kernels_here.plain(x.detach(), 2.0)
with fused_eager(compile="wait", native="never"):
    z = kernels_here.plain(x * 2, 3.0) + 1
    z.sum().backward()
keeper(resolve()).flush()
print(json.dumps([[y.sum().item(), z.sum().item(), x.grad.sum().item()], len(LOG.of("compile")),
                  len(LOG.of("cache-load"))]))
"""
MODULE = """
import jax, jax.numpy as jnp
from fused_eager import jax_op
{before}
SCALE = {scale}
def helper(x): return jnp.tanh(x) * SCALE
@jax_op("second::plain")
def plain(x: jax.Array, s: float) -> jax.Array:
    "Words."
    return helper(x) * s
"""


@pytest.mark.slow
def test_the_next_process_compiles_nothing_whatever_the_file_is_called(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    environment = {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])

    def run(folder: str, scale: float, before: str = "") -> tuple[list[float], int, int]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernels_here.py").write_text(MODULE.format(scale=scale, before=before))
        program = PROGRAM.format(folder=str(tmp_path / folder))
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    values, compiled, loaded = run("first", 2.0)
    assert compiled and not loaded
    # Elsewhere, further down: the same code.
    assert run("second", 2.0, before="# one\n# two\n") == [values, 0, compiled]
    other, again, _ = run("third", 4.0)
    assert other[1] != values[1] and again == compiled


def test_on_tensors_of_the_device() -> None:
    program = """
import fused_eager.tpu, torch
from torch.utils._pytree import tree_map
from tests.frontends.kernels.functions import FUNCTIONS
from tests.frontends.kernels.test_ways import step
for name in ("rms_norm", "scanned", "tree"):
    op, arguments = FUNCTIONS[name]
    args = tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) else x, arguments(torch.float32))
    there = tree_map(lambda x: x.to("tpu") if isinstance(x, torch.Tensor) else x, args)
    for a, b in zip(step(op, args), step(op, there), strict=True):
        assert b.device.type == "tpu"
        torch.testing.assert_close(a, b.cpu())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_is_told_and_does_not_hang() -> None:
    program = """
import os, torch
from tests.frontends.kernels.functions import FUNCTIONS
op, arguments = FUNCTIONS["rms_norm"]
def child():
    try:
        return "ran " + str(tuple(op(*arguments(torch.float32)).shape))
    except RuntimeError as error:
        return str(error)
for _ in range(2):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, child().encode())
        os._exit(0)
    os.close(writing)
    print(os.read(reading, 1000).decode())
    os.waitpid(pid, 0)
    op(*arguments(torch.float32))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.strip().splitlines()
    assert before == "ran (2, 6)" and "forked from one that had started XLA" in after
