"""The program of docs/tutorials/own_kernel.md: a JAX function and a Pallas kernel as torch ops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl

from fused_eager import explain, fused_eager, jax_op, pallas_op


@jax_op("tutorial::rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


torch.manual_seed(0)
x = torch.randn(16, 64, requires_grad=True)
weight = torch.ones(64)
y = rms_norm(x, weight)
y.sum().backward()
print("like any op:", tuple(y.shape), y.dtype, tuple(x.grad.shape))

double = x.detach().double()[:2, :3].requires_grad_()
print("gradients agree:", torch.autograd.gradcheck(lambda t: rms_norm(t, weight[:3].double()), double))


def block(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rms_norm(x * 2, weight)) + x


print("regions:", len(explain(block, x.detach()).regions))


@jax_op("tutorial::store", mutates_args=["cache"])
def store(cache: torch.Tensor, new: torch.Tensor, at: int) -> None:
    return cache.at[at].set(new)


cache = torch.zeros(4, 2)
with fused_eager():
    for i in range(4):
        store(cache, torch.full((2,), float(i)), i)
print("cache:", cache[:, 0].tolist())


@pallas_op("tutorial::shifted", configs=[{"rows": 4}, {"rows": 16}])
def shifted(x: torch.Tensor, by: float, rows: int = 8) -> torch.Tensor:
    def kernel(x_ref: Any, by_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.maximum(x_ref[...], 0) + by_ref[0, 0]

    part = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec((1, 1), lambda i: (0, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(kernel, grid=(x.shape[0] // rows,), in_specs=[part, whole], out_specs=part, out_shape=out)
    return call(x, jnp.full((1, 1), by, x.dtype))


with fused_eager():
    z = shifted(x.detach() * 3, 0.5).mean()
print("a Pallas kernel:", torch.allclose(z, torch.relu(x * 3).mean() + 0.5))
print("configurations tried:", len(next(iter(shifted.tuned.values())).seconds))
