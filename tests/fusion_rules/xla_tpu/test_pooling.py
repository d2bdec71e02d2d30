"""Maxima of windows by XLA's own ops, as for a TPU: what slices give, ties and NaN included."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fused_eager.fusion_rules import families
from fused_eager.fusion_rules.platforms import lowering_for
from fused_eager.fusion_rules.pool_windows import Axis, adaptive, max_windows

families.load()
WINDOWS = {
    "overlapping, padded": (Axis(13, 7, 3, 2, 1), Axis(14, 7, 3, 2, 1)),
    "side by side": (Axis(13, 6, 2, 2), Axis(14, 7, 2, 2)),
    "past the end": (Axis(13, 6, 3, 2), Axis(14, 7, 3, 2)),
    "dilated": (Axis(13, 11, 2, 1, 0, 2), Axis(14, 12, 2, 1, 0, 2)),
    "alike, adaptive": (adaptive(13, 13), adaptive(14, 7)),
    "adaptive": (adaptive(13, 5), adaptive(14, 5)),
}


def images(dtype: type) -> np.ndarray:
    x = np.random.default_rng(0).integers(-2, 3, (2, 3, 13, 14)).astype(dtype)  # many are equal
    if dtype is not np.int32:
        x[0, 0, 3:6, 3:8] = np.nan
        x[1, 1] = -np.inf
        x[1, 2, ::2] = np.inf
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("name", WINDOWS)
def test_maxima_and_their_places(name: str, dtype: type) -> None:
    axes, x = WINDOWS[name], images(dtype)

    def run() -> list[np.ndarray]:
        with jax.enable_x64(True):
            return [np.asarray(v) for v in jax.jit(lambda x: max_windows(x, axes))(x)]

    expected = run()
    with lowering_for("tpu"):
        for there, here in zip(run(), expected, strict=True):
            np.testing.assert_array_equal(there, here)
