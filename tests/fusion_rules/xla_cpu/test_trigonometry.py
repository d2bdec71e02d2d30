"""Sines and arcs by polynomial: their precision, their special values, and when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules import trigonometry
from fused_eager.fusion_rules.xla_cpu.trigonometry import WORTHWHILE
from jax import lax

from fused_eager.xla import enable_x64

ONE = {"sin": 3.0, "cos": 3.0, "tan": 4.0, "asin": 3.0, "acos": 3.0, "atan": 3.0}  # units in the last place
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 2.0**20, 2.0**20 + 1, 1e30, -3e38]


def run(name: str, *args: np.ndarray) -> np.ndarray:
    with enable_x64(True):
        return np.asarray(jax.jit(getattr(trigonometry, name))(*args))


def many(values: list[float], dtype: Any = np.float32) -> np.ndarray:
    return np.resize(np.array(values, dtype), 2 * WORTHWHILE)


def magnitudes(low: float, high: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    v = np.exp(rng.uniform(np.log(low), np.log(high), 4 * WORTHWHILE))
    return (v * rng.choice([-1, 1], v.size)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *[(name, *r) for name in ("sin", "cos", "tan") for r in ((1e-30, 1), (0.5, 100), (1e3, 2**20))],
        *[(name, 1e-30, 1) for name in ("asin", "acos", "atan")],
        ("atan", 0.3, 1e30),
    ],
)
def test_precision(name: str, low: float, high: float) -> None:
    x = magnitudes(low, high)
    right = getattr(np, {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name))(x.astype(np.float64))
    off = np.abs(run(name, x) - right) / np.spacing(np.abs(right).astype(np.float32))
    assert off.max() <= ONE[name]


@pytest.mark.parametrize("values", [SPECIAL, [x for x in SPECIAL if not abs(x) > 2.0**20]], ids=["all", "near"])
@pytest.mark.parametrize("name", ONE)
def test_special_values_are_eagers(name: str, values: list[float]) -> None:
    x = many(values)
    found, expected = run(name, x), getattr(torch, name)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, expected, rtol=5e-7)
    zero = (found == 0) & (expected == 0)
    assert (np.signbit(found) == np.signbit(expected))[zero].all() and zero.any() == (name != "cos")


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_a_far_number_changes_no_other_one(name: str) -> None:
    x = magnitudes(1e-3, 1e5)
    far = x.copy()
    far[7] = 1e30
    alone, beside = run(name, x), run(name, far)
    assert (np.delete(alone, 7) == np.delete(beside, 7)).all() and alone[7] != beside[7]


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_one_large_argument_does_not_spoil_the_others(name: str) -> None:
    x = np.append(magnitudes(1e-3, 100), np.float32(1e20))
    expected = getattr(torch, name)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(name, x), expected, rtol=5e-7)


def test_all_quadrants_of_atan2() -> None:
    y, x = (a.ravel() for a in np.meshgrid(SPECIAL, [*SPECIAL, 0.5, -0.7]))
    y, x = many(list(y)), many(list(x))
    found, expected = run("atan2", y, x), torch.atan2(torch.from_numpy(y), torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, expected, rtol=5e-7, atol=1e-38)
    nan = np.isnan(expected)
    assert (np.signbit(found) == np.signbit(expected))[~nan].all()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_short_floats_are_rounded_once(name: str) -> None:
    x = torch.linspace(-6, 6, 2 * WORTHWHILE).to(getattr(torch, name))
    wide = x.float().numpy()
    with enable_x64(True):
        found = jax.jit(trigonometry.sin)(jax.numpy.asarray(wide).astype(name))
        assert found.dtype == name
        assert np.array_equal(found.astype("float32"), torch.sin(x).float().numpy())


@pytest.mark.parametrize(
    ("size", "dtype"), [(WORTHWHILE - 1, "float32"), (2 * WORTHWHILE, "float64"), (2 * WORTHWHILE, "complex64")]
)
def test_where_it_does_not_pay_xla_has_its_own_way(size: int, dtype: str) -> None:
    def lowered(function: Callable[[Any], Any]) -> str:
        return jax.jit(function).lower(jax.ShapeDtypeStruct((size,), dtype)).as_text().split("{", 1)[1]

    with enable_x64(True):
        assert lowered(lambda x: trigonometry.sin(x)) == lowered(lambda x: lax.sin(x))
