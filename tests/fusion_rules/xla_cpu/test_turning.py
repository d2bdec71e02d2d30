"""Rows that are to be columns in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules.xla_cpu.turning import ROWS, by_pixels, by_planes, turned

from fused_eager.xla import enable_x64


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 16, 1), (3, 16, 5), (2, 17, 33), (1, 48, 7), (4, 100, 3)], ids=str)
def test_every_matrix_is_transposed(shape: tuple[int, ...], dtype: str) -> None:
    with enable_x64(True):
        x = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
        found = jax.jit(lambda x: turned(x.reshape(-1, shape[2]), shape[0]))(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(x).transpose(0, 2, 1).reshape(-1, shape[1]))


IMAGES = [(2, 16, 4, 5), (3, 17, 19), (2, 33, 3, 3, 3), (2, 8, 9, 9), (2, 20, 3, 3), (0, 32, 5, 5)]


@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_images_are_the_same_however_they_lie(shape: tuple[int, ...]) -> None:
    """Those of few channels or pixels, and none, are left alone."""
    x = jnp.arange(np.prod(shape), dtype="float32").reshape(shape)
    is_turned = 0 not in shape and shape[1] >= ROWS and np.prod(shape[2:]) >= ROWS
    for way in (by_pixels, by_planes):
        np.testing.assert_array_equal(jax.jit(way)(x), x)
        assert ("dynamic_slice" in str(jax.make_jaxpr(way)(x))) is bool(is_turned)
