"""Attention on TPUs: JAX's kernel, interpreted, computes what is computed everywhere; and XLA's compiler takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.lower_attention import attend, attend_backward
from fused_eager.fusion_rules.lower_ragged_attention import flash_attention, flash_attention_backward
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


RAGGED = {  # cumulative lengths of queries and keys, causal, window to the left
    "of its own": ([0, 300, 300, 740], None, True, -1),
    "of others": ([0, 100, 712], [0, 400, 1000], False, -1),
    "of none": ([0, 100, 512], [0, 0, 900], False, -1),
    "in rows": ([0, 512, 1024], [0, 512, 1024], False, -1),
    "in a window": ([0, 300, 740], None, True, 64),
}


def ragged(platform: str, given: list[Any], name: str) -> Any:
    of_queries, of_keys, causal, left = RAGGED[name]

    def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
        starts = jnp.asarray(of_queries, jnp.int32)
        others = starts if of_keys is None else jnp.asarray(of_keys, jnp.int32)
        longest = [int(np.diff(x).max()) for x in (of_queries, of_keys or of_queries)]
        how = starts, others, *longest, 0.0, causal
        cx: Any = SimpleNamespace(out=[SimpleNamespace(shape=(0,))] * 5)
        out, lse, *_ = flash_attention(cx, q, k, v, *how, False, window_size_left=left)
        return out, lse, *flash_attention_backward(cx, grad, q, k, v, out, lse, *how, None, None, window_size_left=left)

    with jax.enable_x64(True), lowering_for(platform):
        return jax.make_jaxpr(both)(*given)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", RAGGED)
def test_sequences_of_several_lengths_are_segments_of_the_kernel(name: str) -> None:
    of_queries, of_keys, _, left = RAGGED[name]
    random = np.random.default_rng(0)
    queries, keys = (lengths[-1] + 8 for lengths in (of_queries, of_keys or of_queries))  # eight are of no sequence
    shapes = [(queries, 2, 32), (keys, 1, 32), (keys, 1, 32), (queries, 2, 32)]
    given = [jnp.asarray(random.standard_normal(shape), "float32") for shape in shapes]
    plain, flash = (ragged(platform, given, name) for platform in ("any", "tpu"))
    assert (kernels(plain), kernels(flash)) == (0, 0 if left >= 0 else 3)
    with jax.enable_x64(True):
        expected, found = (jaxpr_as_fun(prepared(t))(*given) for t in (plain, flash))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


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

RAGGED_FOR_A_TPU = """
from types import SimpleNamespace
from fused_eager.fusion_rules.lower_ragged_attention import flash_attention, flash_attention_backward
cx = SimpleNamespace(out=[SimpleNamespace(shape=(0,))] * 5)
def both(q, k, v, grad, starts):
    how = starts, starts, 700, 700, 0.0, True
    out, lse, *_ = flash_attention(cx, q, k, v, *how, False)
    return flash_attention_backward(cx, grad, q, k, v, out, lse, *how, None, None)
form = jax.ShapeDtypeStruct((1000, 2, 64), "bfloat16", sharding=place)
count_kernels(both, form, form, form, form, jax.ShapeDtypeStruct((4,), "int32", sharding=place))
"""


@needs_its_compiler
def test_xlas_compiler_for_tpus_takes_the_kernel() -> None:
    assert kernels_in(FOR_A_TPU) == ["3", "3"]


@needs_its_compiler
def test_xlas_compiler_for_tpus_takes_the_kernel_with_segments() -> None:
    assert kernels_in(RAGGED_FOR_A_TPU) == ["3"]
