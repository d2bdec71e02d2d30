"""Attention on TPUs: JAX's kernel, interpreted, computes what is computed everywhere; and XLA's compiler takes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.lower_attention import attend, attend_backward
from fused_eager.fusion_rules.platforms import lowering_for
from jax.extend.core import jaxpr_as_fun

from fused_eager.frontends.kernels.platforms import kernels, prepared

from .for_a_tpu import kernels_in, needs_its_compiler

families.load()


def traced(platform: str, given: list[Any], mask: Any, causal: bool) -> Any:
    def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
        out, lse = attend(q, k, v, mask, causal, None)
        out = out.astype(q.dtype)
        return out, lse, *attend_backward(grad, q, k, v, out, lse, mask, causal, None)

    with jax.enable_x64(True), lowering_for(platform):
        return jax.make_jaxpr(lambda *x: both(*x))(*given)


def operands(queries: int, keys: int, width: int, shared: int, dtype: str) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = [(1, 2, queries, width), *[(1, shared, keys, width)] * 2, (1, 2, queries, width)]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("queries", "keys", "width", "shared", "dtype", "causal"),
    [
        (512, 512, 64, 2, "float32", True),
        (700, 400, 16, 1, "float32", True),  # neither is whole blocks; grouped heads
        (300, 1024, 128, 2, "float32", False),  # only one is not
        (3, 90000, 8, 2, "float32", False),  # few tokens, and a long past
        (640, 640, 32, 2, "bfloat16", True),
    ],
)
def test_the_kernel_computes_what_is_computed_everywhere(
    queries: int, keys: int, width: int, shared: int, dtype: str, causal: bool
) -> None:
    given = operands(queries, keys, width, shared, dtype)
    plain, flash = (traced(platform, given, None, causal) for platform in ("any", "tpu"))
    assert (kernels(plain), kernels(flash)) == (0, 3)  # forward, and two ways back
    with jax.enable_x64(True):
        expected, found = (jaxpr_as_fun(prepared(t))(*given) for t in (plain, flash))
    assert [x.shape for x in found] == [x.shape for x in expected]
    near = 3e-2 if dtype == "bfloat16" else 1e-5
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=near, atol=near)


@pytest.mark.parametrize("why", ["a mask", "few tokens", "float64", "odd heads"])
def test_what_the_kernel_does_not_take_is_computed_as_everywhere(why: str) -> None:
    length = 16 if why == "few tokens" else 512
    width = 130 if why == "odd heads" else 64
    given = operands(length, length, width, 2, "float32")
    if why == "float64":
        with jax.enable_x64(True):
            given = [jnp.asarray(np.asarray(x), "float64") for x in given]
    mask = jnp.zeros((length, length)) if why == "a mask" else None
    assert kernels(traced("tpu", given, mask, False)) == 0


FOR_A_TPU = """
from fused_eager.fusion_rules.lower_attention import attend, attend_backward
def both(q, k, v, grad):
    out, lse = attend(q, k, v, None, True, None)
    return attend_backward(grad, q, k, v, out.astype(q.dtype), lse, None, True, None)
for dtype, width in (("bfloat16", 64), ("float32", 128)):
    form = jax.ShapeDtypeStruct((1, 2, 600, width), dtype, sharding=place)
    count_kernels(both, form, form, form, form)
"""


@needs_its_compiler
def test_xlas_compiler_for_tpus_takes_the_kernel() -> None:
    assert kernels_in(FOR_A_TPU) == ["3", "3"]
