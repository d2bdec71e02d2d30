"""What a Pallas kernel takes is counted, where the kernel does not say it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fused_eager.fusion_rules.xla_tpu.kernel_costs import Work, estimated, work_of
from jax.experimental import pallas as pl

ROWS, INNER, COLUMNS, BLOCK = 512, 256, 384, 128


def product(says: Any = None) -> Any:
    """A product in blocks: those of the left operand stay while the grid goes along a row."""

    def kernel(x: Any, y: Any, out: Any) -> None:
        @pl.when(pl.program_id(1) >= 0)
        def _() -> None:
            out[...] = jnp.exp(jnp.dot(x[...], y[...]))

    def call(x: Any, y: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(ROWS // BLOCK, COLUMNS // BLOCK),
            in_specs=[
                pl.BlockSpec((BLOCK, INNER), lambda i, j: (i, 0)),
                pl.BlockSpec((INNER, BLOCK), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
            cost_estimate=says,
        )(x, y)

    return jax.make_jaxpr(call)(jnp.ones((ROWS, INNER)), jnp.ones((INNER, COLUMNS)))


def test_products_functions_and_what_is_fetched_are_counted() -> None:
    (eqn,) = product().eqns
    fetched = ROWS * INNER + ROWS // BLOCK * INNER * COLUMNS + ROWS * COLUMNS
    assert work_of(eqn) == Work(2 * ROWS * INNER * COLUMNS, ROWS * COLUMNS, 4 * fetched, 12)


@pytest.mark.parametrize("says", [None, pl.CostEstimate(flops=3, transcendentals=2, bytes_accessed=1)])
def test_a_kernel_that_says_what_it_takes_is_believed(says: Any) -> None:
    inner = jax.make_jaxpr(jax.jit(jax.extend.core.jaxpr_as_fun(product(says))))(
        jnp.ones((ROWS, INNER)), jnp.ones((INNER, COLUMNS))
    )
    (call,) = estimated(inner).eqns
    (eqn,) = call.params["jaxpr"].eqns
    assert eqn.params["cost_estimate"].flops == (3 if says else 2 * ROWS * INNER * COLUMNS)


def test_a_grid_of_a_size_that_is_not_known_is_not_counted() -> None:
    def call(n: Any, x: Any) -> Any:
        return pl.pallas_call(lambda x, out: None, grid=(n,), out_shape=x)(x)

    closed = estimated(jax.make_jaxpr(call)(3, jnp.ones(8)))
    assert closed.eqns[-1].params["cost_estimate"] is None
