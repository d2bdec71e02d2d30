"""Small JAX functions of every kind, with arguments: what the tests of derivatives and of modes go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from fused_eager import JaxOp, jax_op

FUNCTIONS: dict[str, tuple[JaxOp, Callable[[torch.dtype], tuple[Any, ...]]]] = {}
Array = jax.Array


def entry(*shapes: tuple[int, ...], more: tuple[Any, ...] = (), positive: bool = False) -> Any:
    """Enter a function, with random tensors of these shapes and further arguments to call it with."""

    def enter(function: Callable[..., Any]) -> JaxOp:
        op = jax_op(f"kernel_tests::{function.__name__}")(function)

        def arguments(dtype: torch.dtype) -> tuple[Any, ...]:
            rng = torch.Generator().manual_seed(len(function.__name__))
            made = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
            return (*[(t.abs() + 0.5 if positive else t).to(dtype) for t in made], *more)

        FUNCTIONS[function.__name__] = op, arguments
        return op

    return enter


@entry((3, 4), more=(1.5,))
def scaled(x: Array, s: float) -> Array:
    return jnp.tanh(x) * s


@entry((4, 3), (3, 2), (2,))
def dense(x: Array, w: Array, b: Array) -> Array:
    return jax.nn.gelu(x @ w + b, approximate=False)


@entry((2, 5))
def softmax(x: Array) -> Array:
    return jax.nn.softmax(x, axis=-1)


@entry((2, 6), (6,), more=(1e-5,))
def rms_norm(x: Array, w: Array, eps: float) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w


@entry((5,), positive=True)
def exponential(x: Array) -> Array:
    return jnp.exp(x)


@entry((5,), positive=True)
def logarithm(x: Array) -> Array:
    return jnp.log(x) * x


@entry((6,))
def two_results(x: Array) -> tuple[Array, Array]:
    return jnp.sin(x), (x * x).sum()


@entry((4,), (4,), more=(3,))
def scanned(x: Array, y: Array, n: int) -> tuple[Array, Array]:
    def body(c: Array, _: Any) -> tuple[Array, Array]:
        c = jnp.sin(c) * y
        return c, c.sum()

    return lax.scan(body, x, None, length=n)


@entry((4,), more=(4,))
def counted(x: Array, n: int) -> Array:
    return lax.fori_loop(0, n, lambda i, c: jnp.cos(c) * x + c, x)


@entry((3,))
def chosen(x: Array) -> Array:
    return lax.cond(x[0] > 0, lambda v: v * v, lambda v: jnp.sin(v) * v, x)


@entry((4,))
def switched(x: Array) -> Array:
    return lax.switch(2, [jnp.sin, jnp.cos, lambda v: v**3], x)


@entry((3, 3))
def mapped(x: Array) -> Array:
    return lax.map(lambda row: jnp.outer(row, row).sum(0), x)


@entry((5,))
def batched(x: Array) -> Array:
    return jax.vmap(lambda v: jnp.sin(v) * v)(x)


@entry((3, 3))
def solved(x: Array) -> Array:
    return jnp.linalg.solve(x @ x.T + 3 * jnp.eye(3, dtype=x.dtype), x)


@entry((6,))
def gathered(x: Array) -> Array:
    return x[jnp.array([0, 2, 2, 5])] ** 2


@entry((6,), (2,))
def scattered(x: Array, y: Array) -> Array:
    return x.at[jnp.array([1, 4])].add(y * y)


@entry((4, 4))
def symmetric(x: Array) -> Array:
    return jnp.einsum("ij,kj->ik", x, x)


@entry((8,))
def accumulated(x: Array) -> Array:
    return jnp.cumsum(jnp.tanh(x)) * x


@entry((5,))
def remembered(x: Array) -> Array:
    return jax.checkpoint(lambda v: jnp.sin(jnp.sin(v)) * v)(x)


@entry((4,))
def jitted(x: Array) -> Array:
    return jax.jit(lambda v, k: v * k + jnp.sin(v), static_argnums=1)(x, 3)


@entry((2, 3), more=({"scale": torch.full((3,), 1.5, dtype=torch.float64), "power": 2, "shift": 0.25},))
def tree(x: Array, how: dict) -> dict:
    return {"out": [x ** how["power"] * how["scale"] + how["shift"]], "sum": x.sum()}
