"""Functions of functions over a jax_op inside of torch.compile, second derivatives, and what other processes load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch._functorch import predispatch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from fused_eager import KernelError, export, fused_eager, jax_op, pallas_op
from fused_eager.frontends.kernels import levels, program

Tensor = torch.Tensor
Array = jax.Array


@jax_op("transform_tests::wave")
def wave(x: Array, w: Array) -> Array:
    return jnp.sin(x * w) + (x * x).sum(-1, keepdims=True)


def plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x * w) + (x * x).sum(-1, keepdim=True)


X, W, T = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0.5, 2, 4), torch.linspace(1, 2, 12).reshape(3, 4)


def _dual(op: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(op(forward_ad.make_dual(X, T), W)).tangent


FORWARD = [
    lambda op, x: jvp(lambda v: op(v, W), (x,), (T,)),
    lambda op, x: torch.func.jacfwd(lambda v: op(v, W))(x[0]),
    lambda op, x: _dual(op),
]


@pytest.mark.parametrize(
    "function",
    [
        *FORWARD,
        lambda op, x: grad(lambda v: op(v, W).sum())(x),
        lambda op, x: vmap(op, (1, None), out_dims=1)(x.t().contiguous(), W),
    ],
    ids=["jvp", "jacfwd", "dual", "grad", "vmap"],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_function(function: Any, backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    if function in FORWARD and not hasattr(predispatch, "_enter_dual_level_impl"):
        pytest.skip("this torch opens levels of forward derivatives in compiled functions without a word")
    found = torch.compile(lambda x: function(wave, x), backend=backend, fullgraph=True)(X)
    torch.testing.assert_close(found, function(plain, X))
    assert not levels.are_open() and "performance drop" not in capfd.readouterr().err


def test_the_op_in_torch_ops_is_batched_as_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = vmap(torch.ops.transform_tests.wave, (0, None))(X, W)
    torch.testing.assert_close(found, plain(X, W))


@pytest.mark.parametrize("mode", ["off", "fused", "strict"])
def test_second_derivatives_where_an_operand_without_gradient_is_not_needed(mode: str) -> None:
    @jax_op("transform_tests::cubed")
    def cubed(x: Array, c: Array) -> Array:
        return x * x * x + c

    x, c = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(2)
    with fused_eager(mode=mode):
        (g,) = torch.autograd.grad(cubed(x, c).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.sum(), x)
    assert gg.tolist() == [6.0, 12.0]
    out = cubed(x, c)
    c.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@jax_op("transform_tests::exchanged", mutates_args=["a", "b"])
def exchanged(a: Tensor, b: Tensor) -> None:
    return b, a


@pytest.mark.parametrize("mode", ["off", "fused", "strict"])
def test_two_arguments_that_are_written_may_not_share_memory(mode: str) -> None:
    with fused_eager(mode=mode):
        both = torch.arange(6.0)
        exchanged(both[:3], both[3:])
        assert both.tolist() == [3, 4, 5, 0, 1, 2]
        exchanged(both[::2], both[1::2])
        assert both.tolist() == [4, 3, 0, 5, 2, 1]
        for a, b in ((both, both), (both[:4], both[2:]), (both[:3], both[::2])):
            with pytest.raises(KernelError, match="'a' and 'b' that share memory"):
                exchanged(a, b)
        assert both.tolist() == [4, 3, 0, 5, 2, 1]


class Module(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return wave(x * 2, W).sin()


def test_an_exported_program_names_the_op_as_other_processes_know_it(tmp_path: Path) -> None:
    program = torch.export.export(Module(), (X,))
    assert "transform_tests.wave.default" in {str(n.target) for n in program.graph.nodes}
    torch.export.save(program, tmp_path / "program.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "program.pt2").module()(X), Module()(X))

    @jax_op("transform_tests::wave")  # which the name stands for from now on
    def other(x: Array, w: Array) -> Array:
        return x

    again = torch.export.export(Module(), (X,))
    assert "transform_tests.wave.default" not in {str(n.target) for n in again.graph.nodes}
    torch.testing.assert_close(again.module()(X), Module()(X))


def test_the_version_that_graphs_are_kept_under_is_of_all_that_makes_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    first = wave.version()
    assert wave.version() == first
    with jax.default_matmul_precision("float32"):
        assert wave.version() != first
    program.own_digest.cache_clear()
    monkeypatch.setattr(jax, "__version__", "0.0.0")
    assert wave.version() != first
    program.own_digest.cache_clear()


@pallas_op("transform_tests::doubled", configs=[{"rows": 8}, {"rows": 16}])
def doubled(x: Tensor, rows: int = 8) -> Tensor:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, grid=(x.shape[0] // rows,), in_specs=[spec], out_specs=spec, out_shape=out)(x)


class Kernel(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x) + 1


def test_a_kernel_is_exported_for_several_platforms_at_once(tmp_path: Path) -> None:
    x = torch.randn(16, 128)
    loaded = export(Kernel(), (x,), tmp_path / "kernel", platforms=["cpu", "tpu"])
    torch.testing.assert_close(loaded(x), x * 2 + 1)
    assert b"tpu_custom_call" in (tmp_path / "kernel" / "program.bin").read_bytes()


def test_a_kernel_is_not_tuned_where_sizes_are_symbols() -> None:
    program = torch.export.export(Kernel(), (torch.randn(16, 128),), dynamic_shapes=({0: torch.export.Dim("n") * 8},))
    torch.testing.assert_close(program.module()(torch.ones(24, 128)), torch.full((24, 128), 3.0))
