"""Axes, exact quotients, and the two tricks with barriers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.axes import (
    again,
    average,
    axes_of,
    axis_of,
    identity,
    index_along,
    moments,
    quotient,
    separated,
)
from fused_eager.fusion_rules.lowering import Context
from fused_eager.fusion_rules.platforms import lowering_for
from fused_eager.fusion_rules.spec import Spec
from fused_eager.fusion_rules.xla_cpu.steps import CACHED

from fused_eager.xla import enable_x64


@pytest.fixture(autouse=True)
def wide() -> Any:
    with enable_x64(True):
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
        return again(x)[0] - separated(context(), x, x.max(1, keepdims=True))[0]

    assert np.array_equal(jax.jit(plain)(x), jax.jit(cut)(x))


def test_loops_are_cut_on_cpu_for_arrays_that_fit_a_cache() -> None:
    small, large = jax.ShapeDtypeStruct((4, 4), np.float32), jax.ShapeDtypeStruct((4, CACHED), np.float32)

    def cuts(x: Any, platform: str) -> int:
        with lowering_for(platform):
            text = str(jax.make_jaxpr(lambda x: separated(context(), x, x.max(1, keepdims=True)))(x))
        return text.count("optimization_barrier")

    assert cuts(small, "cpu") == 1 and cuts(large, "cpu") == 0 and cuts(small, "cuda") == 0
