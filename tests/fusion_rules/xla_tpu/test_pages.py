"""Attention over pages on TPUs: the kernel, interpreted, computes what is computed everywhere; and XLA's compiler takes
it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.lower_ragged_attention import flash_attention
from fused_eager.fusion_rules.platforms import lowering_for

from fused_eager.frontends.kernels.platforms import kernels

from .for_a_tpu import kernels_in, needs_its_compiler
from .test_attention import values

families.load()

# Queries of each sequence, keys that it uses, the window, heads of queries and keys, the size of a page, the dtype.
CASES = {
    "decoding": ([1, 1, 1, 1], [5, 40, 0, 64], (-1, 0), 4, 2, 16, "float32"),
    "many steps": ([1, 1], [250, 130], (-1, 0), 2, 2, 8, "float32"),
    "one head of keys": ([1, 1, 1], [33, 1, 90], (-1, -1), 4, 1, 32, "float32"),
    "several queries": ([3, 0, 2], [50, 20, 2], (-1, 0), 4, 2, 16, "float32"),
    "a window": ([1, 4], [70, 61], (20, 0), 2, 1, 16, "float32"),
    "both sides, and queries before all keys": ([5, 1], [3, 70], (20, 1), 2, 2, 8, "float32"),
    "halves": ([1, 2], [70, 61], (-1, 0), 4, 2, 16, "bfloat16"),
}


def traced(platform: str, name: str, wild: bool = False) -> tuple[Any, list[Any]]:
    of_queries, used, window, heads, shared, size, dtype = CASES[name]
    random = np.random.default_rng(0)
    n, number = max(-(-max(used) // size), -(-128 // (size * shared))), 70
    table = random.permutation(number)[: n * len(used)].reshape(len(used), n).astype("int32")
    pools = [random.standard_normal((number, size, shared, 32)) for _ in range(2)]
    for row, keys in zip(table, used, strict=True):  # what is not used may be anything
        for pool in pools:
            pool[row[keys // size :][:1], keys % size :] = np.nan
        row[-(-keys // size) :] = -7
    if wild:  # of the first key: some of each head, of values alone
        for head, numbers in enumerate(([np.nan, 1], [np.inf, 2], [-np.inf, 3], [np.nan, np.inf])[:shared]):
            pools[1][table[:, 0], 0, head, 4 * head : 4 * head + 2] = numbers
    starts = jnp.asarray(np.cumsum([0, *of_queries]), jnp.int32)
    q = random.standard_normal((int(starts[-1]), heads, 32))

    def call(q: Any, k: Any, v: Any, starts: Any, used: Any, table: Any) -> Any:
        cx: Any = SimpleNamespace(out=[SimpleNamespace(shape=(0,))] * 5)
        how = starts, None, max(of_queries), n * size, 0.0, False, False
        bounds = {"window_size_left": window[0], "window_size_right": window[1]}
        return flash_attention(cx, q, k, v, *how, **bounds, seqused_k=used, block_table=table)[:2]

    given = [*[jnp.asarray(x, dtype) for x in (q, *pools)], starts, jnp.asarray(used, jnp.int32), jnp.asarray(table)]
    with jax.enable_x64(True), lowering_for(platform):
        return jax.make_jaxpr(call)(*given), given


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_what_is_computed_everywhere(name: str) -> None:
    (plain, given), (flash, _) = (traced(platform, name) for platform in ("any", "tpu"))
    assert (kernels(plain), kernels(flash)) == (0, 1)
    near = 2e-2 if CASES[name][-1] == "bfloat16" else 1e-5
    for a, b in zip(values(flash, given), values(plain, given), strict=True):
        a, b = (np.asarray(x, "float32") for x in (a, b))
        assert not np.isnan(b).any()
        np.testing.assert_allclose(a, b, rtol=near, atol=near)


def test_values_that_are_not_finite_stay_with_the_head_and_the_place_that_they_belong_to() -> None:
    CASES["wild"] = ([1, 1], [5, 40], (-1, 0), 8, 4, 16, "float32")
    (plain, given), (flash, _) = (traced(platform, "wild", True) for platform in ("any", "tpu"))
    found, wanted = (np.asarray(values(x, given)[0]) for x in (flash, plain))
    assert np.isfinite(found).sum() == found.size - 2 * 2 * 5  # two sequences, two queries to a head of keys
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("why", ["float16", "odd pages", "many queries"])
def test_what_the_kernel_does_not_take_is_computed_as_everywhere(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = list(CASES["several queries"])
    if why == "float16":
        case[-1] = why
    if why == "odd pages":
        case[-2] = 5
    if why == "many queries":
        case[0] = [200, 0, 2]
    monkeypatch.setitem(CASES, why, tuple(case))
    assert kernels(traced("tpu", why)[0]) == 0


FOR_A_TPU = """
from types import SimpleNamespace
from fused_eager.fusion_rules.lower_ragged_attention import flash_attention
cx = SimpleNamespace(out=[SimpleNamespace(shape=(0,))] * 5)
def call(q, k, v, starts, used, table):
    return flash_attention(cx, q, k, v, starts, None, 2, 512, 0.0, True, False, seqused_k=used, block_table=table)[:2]
def form(shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
for dtype, heads, size, width in (("bfloat16", 8, 16, 128), ("float32", 1, 32, 64)):
    pages = form((100, size, heads, width), dtype)
    count_kernels(call, form((8, 8, width), dtype), pages, pages, form((5,)), form((4,)), form((4, 512 // size)))
"""


@needs_its_compiler
def test_xlas_compiler_for_tpus_takes_the_kernel() -> None:
    assert kernels_in(FOR_A_TPU) == ["1", "1"]
