"""Pallas kernels as ops: interpreted here, compiled by Mosaic for a TPU, and tuned."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

from fused_eager import KernelError, explain, fused_eager, jax_op, pallas_op
from fused_eager.frontends.kernels import pallas

Tensor = torch.Tensor
Array = jax.Array
ROOT = Path(__file__).resolve().parents[3]


def _scaled(x: Array, y: Array, block: int) -> Array:
    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2 + y_ref[...]

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    grid = (x.shape[0] // block,)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, grid=grid, in_specs=[spec, spec], out_specs=spec, out_shape=out)(x, y)


@pallas_op("pallas_tests::scaled")
def scaled(x: Tensor, y: Tensor, block: int = 8) -> Tensor:
    return _scaled(x, y, block)


@jax.custom_vjp
def _with_gradient(x: Array, y: Array) -> Array:
    return _scaled(x, y, 8)


# The way back is a kernel as well.
_with_gradient.defvjp(lambda x, y: (_scaled(x, y, 8), None), lambda _, g: (_scaled(g, jnp.zeros_like(g), 8), g))


@jax_op("pallas_tests::with_gradient")
def with_gradient(x: Array, y: Array) -> Array:
    return _with_gradient(x, y)


@pytest.mark.parametrize("mode", ["off", "fused"])
def test_a_kernel_may_compute_with_64_bits_beside_one_that_does_not(mode: str) -> None:
    @pallas_op("pallas_tests::counted")
    def counted(x: Tensor, n: Tensor) -> Tensor:
        def kernel(n_ref: Any, x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = x_ref[...] + ((n_ref[0] + pl.program_id(0)) // 2).astype(x_ref.dtype)

        part = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        specs = [pl.BlockSpec((1,), lambda i: (0,)), part]
        return pl.pallas_call(kernel, grid=(x.shape[0] // 8,), in_specs=specs, out_specs=part, out_shape=out)(n, x)

    x, wanted = torch.zeros(24, 2), torch.tensor([3.0, 4.0, 4.0]).repeat_interleave(8)
    with fused_eager(mode=mode):
        narrow = counted(x, torch.tensor([7], dtype=torch.int32))
        found = [narrow, counted(x, torch.tensor([7])), counted(x.double(), torch.tensor([7]))]
    for out in found:
        assert out[:, 0].tolist() == wanted.tolist()


@pytest.mark.parametrize("mode", ["off", "strict", "fused"])
def test_a_kernel_runs_on_a_cpu_without_a_word_of_it(mode: str) -> None:
    x, y = torch.randn(32, 4), torch.randn(32, 4)
    with fused_eager(mode=mode):
        found = [scaled(x * 3, y, block) + 1 for block in (8, 32)]
    for out in found:
        torch.testing.assert_close(out, x * 6 + y + 1)


def test_it_is_fused_with_its_neighbours() -> None:
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    seen = explain(lambda: scaled(x * 3, y) + 1)
    assert len(seen.regions) == 1 and "pallas_tests.scaled.call" in str(seen)


def test_gradients_and_batches_of_kernels() -> None:
    x, y = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    with_gradient(x, y).sin().sum().backward()
    slope = torch.cos(x.detach() * 2 + y.detach())
    torch.testing.assert_close((x.grad, y.grad), (slope * 2, slope))
    both = torch.stack([x, y]).detach()
    torch.testing.assert_close(torch.vmap(lambda v: scaled(v, both[0]))(both), both * 2 + both[0])
    with pytest.raises(RuntimeError, match="pallas_tests::scaled has no gradient: JAX says"):
        scaled(x, y).sum().backward()


def test_the_fastest_configuration_is_found_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    @pallas_op("pallas_tests::tuned", configs=[{"block": 8}, {"block": 7}, {"block": 16}])
    def tuned(x: Tensor, y: Tensor, block: int = 4) -> Tensor:
        if x.shape[0] % block:
            raise ValueError("the block does not divide it")
        return _scaled(x, y, block)

    times = iter([3.0, 1.0, 1.0, 2.0])
    measure = pallas.PallasOp._seconds

    def fake(self: Any, run: Any) -> float:
        measure(self, run)
        calls.append(run.program.name)
        return next(times)

    monkeypatch.setattr(pallas.PallasOp, "_seconds", fake)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    for mode in ("off", "fused", "strict"):
        with fused_eager(mode=mode):
            out = tuned(x, y)
        torch.testing.assert_close(out, x * 2 + y)
    (found,) = tuned.tuned.values()
    assert (dict(found.config), found.seconds, len(calls)) == ({"block": 16}, {0: 3.0, 2: 1.0}, 2)
    tuned(x, y, block=2)
    with fused_eager(deterministic=True):
        tuned(torch.cat([x, x]), torch.cat([y, y]))
    assert len(calls) == 2
    tuned(torch.cat([x, x]), torch.cat([y, y]))
    assert [dict(t.config) for t in tuned.tuned.values()] == [{"block": 16}, {"block": 8}]
    with pytest.raises(ValueError, match="does not divide"):
        tuned(x[:5], y[:5])


def test_a_configuration_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(pallas.PallasOp, "_seconds", lambda *_: next(times))

    @pallas_op("pallas_tests::covering", configs=[{"block": 8}, {"block": 3}, {"block": 4}])
    def covering(x: Tensor, y: Tensor, block: int = 4) -> Tensor:
        return _scaled(x, y, block)  # blocks of 3 do not reach the last row

    x, y = torch.randn(16, 4), torch.randn(16, 4)
    torch.testing.assert_close(covering(x, y), x * 2 + y)
    (found,) = covering.tuned.values()
    assert (dict(found.config), set(found.seconds)) == ({"block": 4}, {0, 2})


def test_real_times_are_taken() -> None:
    @pallas_op("pallas_tests::timed", configs=[{"block": 8}, {"block": 64}])
    def timed(x: Tensor, y: Tensor, block: int = 4) -> Tensor:
        return _scaled(x, y, block)

    x, y = torch.randn(64, 4), torch.randn(64, 4)
    torch.testing.assert_close(timed(x, y), x * 2 + y)
    (found,) = timed.tuned.values()
    assert set(found.seconds) == {0, 1} and all(s > 0 for s in found.seconds.values()) and not found.remembered


TUNING = """
import torch
from tests.frontends.kernels import test_pallas as t
from fused_eager import pallas_op
from fused_eager.compiling.caching import keeper
from fused_eager.config import resolve
@pallas_op("pallas_tests::kept", configs=[{"block": 8}, {"block": 16}])
def kept(x: torch.Tensor, y: torch.Tensor, block: int = 4) -> torch.Tensor:
    return t._scaled(x, y, block)
kept(torch.ones(16, 4), torch.ones(16, 4))
keeper(resolve()).flush()
(found,) = kept.tuned.values()
print(found.remembered, dict(found.config), found.seconds)
"""


def run(program: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_EAGER_")}
    command, everywhere = [sys.executable, "-c", program], {**kept, **environment}
    done = subprocess.run(command, cwd=ROOT, env=everywhere, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_next_process_remembers_the_configuration(tmp_path: Path) -> None:
    first, second = [run(TUNING, XDG_CACHE_HOME=str(tmp_path)).split(maxsplit=1) for _ in range(2)]
    assert (first[0], second[0]) == ("False", "True") and first[1] == second[1]


FOR_TPU = """
import jax, torch
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tests.frontends.kernels.test_pallas import scaled
_, _, program = scaled.taken(torch.ones(256, 128), torch.ones(256, 128), 128)
where = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0])
def region(x, y):
    return program.lower([x * 3, y], [])[0] + 1
shapes = [jax.ShapeDtypeStruct((256, 128), "float32")] * 2
text = jax.jit(region, in_shardings=where, out_shardings=where).lower(*shapes).compile().as_text()
print(text.count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, XLA's compiler for TPUs, is not there")
def test_mosaic_compiles_it_for_a_tpu() -> None:
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    assert run(FOR_TPU, ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu", **quiet).split()[-1] == "1"


def test_the_kernel_is_in_the_program_for_a_tpu() -> None:
    _, _, program = scaled.taken(torch.ones(256, 128), torch.ones(256, 128), 128)
    shape = jax.ShapeDtypeStruct((256, 128), "float32")
    traced = jax.jit(lambda x, y: program.lower([x * 3, y], [])[0] + 1).trace(shape, shape)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"block": 8}, r"configs is \{'block': 8\}: it is a list of dicts"),
        ([{"size": 8}], "set 'size', which is not one of its static parameters with a default; those are block"),
        ([{"x": 8}], "set 'x', which is not"),
    ],
)
def test_bad_configurations(configs: Any, words: str) -> None:
    with pytest.raises(KernelError, match=words):

        @pallas_op("pallas_tests::bad", configs=configs)
        def bad(x: Tensor, block: int = 8) -> Tensor:
            return x
