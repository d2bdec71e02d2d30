"""Rows that are to be columns in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_eager.fusion_rules.turning import turned


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 16, 1), (3, 16, 5), (2, 17, 33), (1, 48, 7), (4, 100, 3)], ids=str)
def test_every_matrix_is_transposed(shape: tuple[int, ...], dtype: str) -> None:
    with jax.enable_x64(True):
        x = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
        found = jax.jit(lambda x: turned(x.reshape(-1, shape[2]), shape[0]))(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(x).transpose(0, 2, 1).reshape(-1, shape[1]))
