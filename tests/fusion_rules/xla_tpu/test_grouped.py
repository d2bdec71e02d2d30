"""Products of groups of rows on TPUs: JAX's kernels, interpreted, compute what is computed everywhere, and compile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.lower_grouped import rows_by_groups, sums_by_groups
from fused_eager.fusion_rules.platforms import lowering_for
from jax.extend.core import jaxpr_as_fun

from fused_eager.frontends.kernels.platforms import kernels, prepared

from .for_a_tpu import kernels_in, needs_its_compiler

families.load()


def both(x: Any, weights: Any, y: Any, offsets: Any) -> Any:
    return rows_by_groups(x, weights, offsets), sums_by_groups(x, y, offsets)


@pytest.mark.parametrize("rows", [256, 300])
@pytest.mark.parametrize("offsets", [[10, 10, 171, 256], [0, 130, 130, 200]], ids=["whole", "with gaps"])
def test_the_kernels_compute_what_is_computed_everywhere(rows: int, offsets: list[int]) -> None:
    random = np.random.default_rng(0)
    given = [jnp.asarray(random.standard_normal(s), "float32") for s in ((rows, 128), (4, 128, 160), (rows, 160))]
    given.append(jnp.asarray(offsets, "int32"))
    found = {}
    for platform in ("any", "tpu"):
        with jax.enable_x64(True), lowering_for(platform):
            traced = jax.make_jaxpr(lambda *arrays: both(*arrays))(*given)
            assert kernels(traced) == (0 if platform == "any" else 2)
            found[platform] = jaxpr_as_fun(prepared(traced))(*given)
    for plain, kernel in zip(found["any"], found["tpu"], strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=1e-5, atol=1e-4)


FOR_A_TPU = """
from tests.fusion_rules.xla_tpu.test_grouped import both
for dtype in ("bfloat16", "float32"):
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in ((600, 256), (4, 256, 384), (600, 384))]
    count_kernels(both, *given, jax.ShapeDtypeStruct((4,), "int32", sharding=place))
"""


@needs_its_compiler
def test_xlas_compiler_for_tpus_takes_the_kernels() -> None:
    assert kernels_in(FOR_A_TPU) == ["2", "2"]
