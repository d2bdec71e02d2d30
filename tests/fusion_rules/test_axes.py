"""Axes, exact quotients, and the two tricks with barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.axes import (
    CACHED,
    again,
    apart,
    average,
    axes_of,
    axis_of,
    identity,
    index_along,
    moments,
    quotient,
    reduced,
    sum_over,
)
from fused_eager.fusion_rules.lowering import Context
from fused_eager.fusion_rules.spec import Spec
from jax import lax

from fused_eager import compile as compiling


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


def context(device: str = "cpu") -> Context:
    return Context((Spec((4,), torch.float32, (1,), torch.device(device)),))


def test_axes() -> None:
    assert axes_of(None, 3) == axes_of([], 3) == (0, 1, 2)
    assert axes_of(-1, 3) == (2,)
    assert axes_of([0, -1], 3) == (0, 2)
    assert axes_of(-1, 0) == axes_of([0], 0) == axes_of(None, 0) == ()
    assert axis_of(-1, 0) == 0 and axis_of(-2, 3) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_quotients_are_rounded_once(dtype: Any) -> None:
    x = np.arange(1, 2000).astype(dtype)
    for n in (3, 7, 49):
        assert np.array_equal(jax.jit(lambda x, n=n: quotient(x, n))(x), x / dtype(n))
        assert np.array_equal(jax.jit(quotient)(x, np.float64(n)), x / dtype(n))


def test_the_plain_quotient_is_not() -> None:
    # If this fails, XLA divides by constants exactly by now, and `quotient` may go.
    x = np.arange(1, 2000).astype(np.float32)
    assert not np.array_equal(jax.jit(lambda x: x / np.float32(49))(x), x / np.float32(49))


def test_moments_survive_a_large_mean() -> None:
    x = np.asarray([[1e6 - 1, 1e6, 1e6 + 1]], np.float32)
    mean, centred, squares = jax.jit(lambda x: moments(x, (1,)))(x)
    assert mean.item() == 1e6 and squares.item() == 2 and centred.tolist() == [[-1, 0, 1]]


def test_the_average_of_nothing_is_nan() -> None:
    assert np.isnan(jax.jit(lambda x: average(x, (1,)))(np.zeros((2, 0), np.float32))).all()


def test_identities() -> None:
    assert identity(np.int8, True) == 127 and identity(np.uint8, False) == 0
    assert identity(np.float32, False) == -np.inf and identity(np.bool_, True)


def test_positions() -> None:
    assert index_along((2, 3), 1).tolist() == [[0, 1, 2]] * 2


def test_barriers_change_no_value() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)

    def plain(x: Any) -> Any:
        return x - x.max(1, keepdims=True)

    def cut(x: Any) -> Any:
        return again(x)[0] - apart(context(), x, x.max(1, keepdims=True))[0]

    assert np.array_equal(jax.jit(plain)(x), jax.jit(cut)(x))


def test_loops_are_cut_on_cpu_for_arrays_that_fit_a_cache() -> None:
    small, large = jax.ShapeDtypeStruct((4, 4), np.float32), jax.ShapeDtypeStruct((4, CACHED), np.float32)

    def cuts(x: Any, device: str) -> int:
        text = str(jax.make_jaxpr(lambda x: apart(context(device), x, x.max(1, keepdims=True)))(x))
        return text.count("optimization_barrier")

    assert cuts(small, "cpu") == 1 and cuts(large, "cpu") == 0 and cuts(small, "cuda") == 0


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
    return compiling._compiled(jax.jit(function).lower(x))(x)


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
    assert compiling._compiled(lowered).memory_analysis().temp_size_in_bytes < x.nbytes / 2


def test_the_plain_sum_stores_it() -> None:
    # If this fails, XLA does by itself what `reduced` is for.
    x = np.ones((1024, 1024), np.float32)
    lowered = jax.jit(lambda x: lax.reduce_sum(lax.exp(x) * x, (1,))).lower(x)
    assert compiling._compiled(lowered).memory_analysis().temp_size_in_bytes >= x.nbytes


def test_many_equal_numbers_are_summed_exactly_enough() -> None:
    for shape in ((1 << 20,), (1024, 1000), (31, 33, 128)):
        x = np.full(shape, 0.1, np.float32)
        found = float(run(lambda x: sum_over(x, tuple(range(x.ndim))), x))
        assert abs(found / (float(np.float32(0.1)) * x.size) - 1) < 2e-6
