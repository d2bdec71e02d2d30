"""Reductions in steps: every value once, nothing stored that is only summed, and digits kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from fused_eager.fusion_rules.axes import sum_over
from fused_eager.fusion_rules.xla_cpu.steps import reduced
from jax import lax

from fused_eager import xla

REDUCTIONS = [
    ((1 << 20,), (0,)), ((1024, 1024), (1,)), ((1024, 1024), (0,)), ((1024, 1024), (0, 1)), ((8, 128, 256), (0, 1)),
    ((64, 16384), (1,)), ((2048, 1000), (1,)), ((16, 32, 32, 64), (0, 1, 2)), ((16, 64, 32, 32), (0, 2, 3)),
]  # fmt: skip
AWKWARD = [
    ((65_537,), (0,)), ((97, 101), (1,)), ((101, 97), (0,)), ((3, 5, 7, 11, 13), (0, 2, 4)), ((2, 8192), (0, 1)),
    ((9000, 2), (1,)), ((128, 66), (1,)), ((4, 8192, 1), (1, 2)), ((1, 9984), (1,)), ((64, 1, 256), (1, 2)),
    ((8200,), ()),
]  # fmt: skip


def run(function: Callable[[Any], Any], x: np.ndarray) -> Any:
    return xla.compiled(jax.jit(function).lower(x))(x)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("shape", "axes"), REDUCTIONS + AWKWARD, ids=str)
def test_reductions_in_steps_take_every_value_once(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(-8, 9, shape).astype(np.float32)
    assert np.array_equal(run(lambda x: sum_over(x, axes), x), x.sum(axes))
    assert np.array_equal(run(lambda x: reduced(lax.reduce_max, x, axes), x), x.max(axes) if axes else x)
    x.flat[x.size // 3] = np.nan
    assert np.isnan(run(lambda x: reduced(lax.reduce_min, x, axes), x)).sum() == 1


@pytest.mark.parametrize(("shape", "axes"), REDUCTIONS, ids=str)
def test_what_is_summed_is_not_stored_first(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    lowered = jax.jit(lambda x: sum_over(lax.exp(x) * x, axes)).lower(x)
    assert xla.compiled(lowered).memory_analysis().temp_size_in_bytes < x.nbytes / 2


def test_the_plain_sum_stores_it() -> None:
    # If this fails, XLA does by itself what `reduced` is for.
    x = np.ones((1024, 1024), np.float32)
    lowered = jax.jit(lambda x: lax.reduce_sum(lax.exp(x) * x, (1,))).lower(x)
    assert xla.compiled(lowered).memory_analysis().temp_size_in_bytes >= x.nbytes


def test_many_equal_numbers_are_summed_exactly_enough() -> None:
    for shape in ((1 << 20,), (1024, 1000), (31, 33, 128)):
        x = np.full(shape, 0.1, np.float32)
        found = float(run(lambda x: sum_over(x, tuple(range(x.ndim))), x))
        assert abs(found / (float(np.float32(0.1)) * x.size) - 1) < 2e-6
