"""Attention on TPUs: JAX's kernels, interpreted, compute what is computed everywhere; and XLA's compiler takes it."""

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
from fused_eager.fusion_rules.xla_tpu import attention
from fused_eager.fusion_rules.xla_tpu.windows import Band
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


def values(traced: Any, given: list[Any]) -> Any:
    """What a traced program makes of arrays, its kernels interpreted. XLA need not make that fast."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with jax.enable_x64(True):
        return jax.jit(jaxpr_as_fun(prepared(traced))).lower(*given).compile(compiler_options=quick)(*given)


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
    expected, found = (values(t, given) for t in (plain, flash))
    assert [x.shape for x in found] == [x.shape for x in expected]
    near = 3e-2 if dtype == "bfloat16" else 1e-5
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=near, atol=near)


ANY = -1, -1
CAUSAL = -1, 0
RAGGED = {  # cumulative lengths of queries and keys, the window, heads of keys, the dtype
    "of its own": ([0, 300, 300, 740], None, CAUSAL, 1, "float32"),
    "of others": ([0, 100, 712], [0, 400, 1000], ANY, 1, "float32"),
    "of none": ([0, 100, 512], [0, 0, 900], ANY, 1, "float32"),
    "in rows": ([0, 512, 1024], [0, 512, 1024], ANY, 1, "float32"),
}
# A query sees a part of those: lengths that fill no block, sequences of no tokens, blocks in which nothing is seen.
WITHIN = {
    "before": ([0, 300, 300, 440], None, (64, 0), 1, "float32"),
    "on both sides": ([0, 130, 400], None, (100, 30), 2, "float32"),
    "after": ([0, 130, 400], None, (0, 20), 1, "float32"),
    "to the end": ([0, 300, 440], None, (90, -1), 1, "float32"),
    "in one row": ([0, 2, 3, 5, 300], None, (40, 0), 2, "float32"),
    "halves": ([0, 300, 440], None, (64, 0), 2, "bfloat16"),
    "wider than all": ([0, 140, 400], None, (5000, 0), 1, "float32"),
    "fewer queries": ([0, 3, 3, 40], [0, 300, 340, 400], CAUSAL, 1, "float32"),
    "fewer queries, in a window": ([0, 30, 170], [0, 400, 560], (90, 0), 1, "float32"),
    "more queries, of which some see nothing": ([0, 280, 300], [0, 150, 290], (60, 10), 2, "float32"),
    "of no keys": ([0, 140, 200], [0, 0, 150], CAUSAL, 2, "float32"),
}


def ragged(platform: str, given: list[Any], of_queries: list[int], of_keys: list[int] | None, window: Any) -> Any:
    def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
        starts = jnp.asarray(of_queries, jnp.int32)
        others = starts if of_keys is None else jnp.asarray(of_keys, jnp.int32)
        longest = [int(np.diff(x).max()) for x in (of_queries, of_keys or of_queries)]
        how = starts, others, *longest, 0.0, window == CAUSAL
        bounds = {"window_size_left": window[0], "window_size_right": window[1]}
        cx: Any = SimpleNamespace(out=[SimpleNamespace(shape=(0,))] * 5)
        out, lse, *_ = flash_attention(cx, q, k, v, *how, False, **bounds)
        return out, lse, *flash_attention_backward(cx, grad, q, k, v, out, lse, *how, None, None, **bounds)

    with jax.enable_x64(True), lowering_for(platform):
        return jax.make_jaxpr(both)(*given)


def alike(case: Any) -> None:
    """The kernel computes what is computed everywhere, forward and backward."""
    of_queries, of_keys, window, shared, dtype = case
    random = np.random.default_rng(0)
    queries, keys = (lengths[-1] + 8 for lengths in (of_queries, of_keys or of_queries))  # eight are of no sequence
    shapes = [(queries, 2, 32), (keys, shared, 32), (keys, shared, 32), (queries, 2, 32)]
    given = [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]
    plain, flash = (ragged(platform, given, of_queries, of_keys, window) for platform in ("any", "tpu"))
    assert (kernels(plain), kernels(flash)) == (0, 3)
    expected, found = (values(t, given) for t in (plain, flash))
    near = 5e-2 if dtype == "bfloat16" else 1e-5
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, "float32"), np.asarray(b, "float32"), rtol=near, atol=near)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", RAGGED)
def test_sequences_of_several_lengths_are_segments_of_the_kernel(name: str) -> None:
    alike(RAGGED[name])


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", WITHIN)
def test_within_a_window_the_kernel_goes_to_what_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.LEAST.own, "tpu", 1)  # few tokens, as interpreting takes long
    alike(WITHIN[name])


BANDS = [Band(64, 0, 0), Band(None, 0, 130), Band(200, 10, -130), Band(0, 0, 0), Band(5, None, 9)]


@pytest.mark.parametrize("band", BANDS)
def test_which_blocks_something_is_seen_in(band: Band) -> None:
    places = np.meshgrid(np.arange(512), np.arange(768), indexing="ij")
    seen = np.broadcast_to(band.seen(*places), (512, 768)).reshape(4, 128, 3, 256)
    np.testing.assert_array_equal(band.blocks(512, 768, 128, 256), seen.any((1, 3)))


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
def both(alike, window):
    def call(q, k, v, grad, starts, others):
        how = starts, starts if alike else others, 700, 700 if alike else 900, 0.0, False
        bounds = dict(window_size_left=window[0], window_size_right=window[1])
        out, lse, *_ = flash_attention(cx, q, k, v, *how, False, **bounds)
        return flash_attention_backward(cx, grad, q, k, v, out, lse, *how, None, None, **bounds)
    return call
cum = jax.ShapeDtypeStruct((4,), "int32", sharding=place)
for dtype, width, *how in (("bfloat16", 64, True, (-1, 0)), ("float32", 64, True, (300, 20)),
                           ("bfloat16", 128, False, (-1, 0))):
    form = [jax.ShapeDtypeStruct((1200, heads, width), dtype, sharding=place) for heads in (2, 1)]
    count_kernels(both(*how), form[0], form[1], form[1], form[0], cum, cum)
"""


@needs_its_compiler
def test_xlas_compiler_for_tpus_takes_the_kernel() -> None:
    assert kernels_in(FOR_A_TPU) == ["3", "3"]


@needs_its_compiler
def test_xlas_compiler_for_tpus_takes_the_kernel_with_segments_and_windows() -> None:
    assert kernels_in(RAGGED_FOR_A_TPU) == ["3"] * 3
