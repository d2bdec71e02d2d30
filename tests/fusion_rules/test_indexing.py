"""The gather and the scatter under the rows, and what they make of constants."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fused_eager.fusion_rules.indexing import progression, put_at, rank, take_at

from fused_eager.xla import enable_x64


@pytest.mark.parametrize(("index", "run"), [
    ([2, 3, 4], (2, 3, 1)), ([0, 2, 4], (0, 3, 2)), ([4], (4, 1, 1)), ([1, 2, 4], None), ([3, 2, 1], None),
    ([-2, -1], None), ([1, 1], None), ([], None),
])
def test_progression(index: list[int], run: tuple[int, int, int] | None) -> None:
    assert progression(np.asarray(index, np.int64)) == run


def primitives(function, *args) -> set[str]:
    with enable_x64(True):
        return {str(e.primitive) for e in jax.make_jaxpr(function)(*args).eqns}


def test_a_constant_progression_is_a_slice_and_anything_else_a_gather() -> None:
    x = np.arange(24.0).reshape(4, 6)
    steps, others = np.asarray([1, 3, 5]), np.asarray([1, 2, 5])
    assert primitives(lambda x: take_at(x, (1,), [steps], 1), x) == {"slice"}
    assert "gather" in primitives(lambda x: take_at(x, (1,), [others], 1), x)
    with enable_x64(True):
        assert (np.asarray(take_at(jax.numpy.asarray(x), (1,), [steps], 1)) == x[:, [1, 3, 5]]).all()


def test_one_write_is_an_update_in_place() -> None:
    x, values = np.zeros((4, 6)), np.ones((4, 1))
    assert "dynamic_update_slice" in primitives(lambda x, i: put_at(x, (1,), [i], 1, values, "set"), x, np.asarray([2]))


def test_writes_outside_are_left_out_and_reads_outside_stay_inside() -> None:
    with enable_x64(True):
        x, index = jax.numpy.arange(3.0), jax.numpy.asarray([-1, 3, 1])
        assert np.asarray(put_at(x, (0,), [index], 0, jax.numpy.ones(3), "add")).tolist() == [0.0, 2.0, 2.0]
        assert set(np.asarray(take_at(x, (0,), [index], 0)).tolist()) <= {0.0, 1.0, 2.0}


def test_columns_outside_are_left_out() -> None:
    with enable_x64(True):
        x, index = jax.numpy.zeros((2, 3)), jax.numpy.asarray([-1, 3, 1])
        assert np.asarray(put_at(x, (1,), [index], 1, jax.numpy.ones((2, 3)), "add")).tolist() == [[0.0, 1.0, 0.0]] * 2


@pytest.mark.parametrize("n", [1, 100, 1 << 14, (1 << 14) + 77])
def test_rank(n: int) -> None:
    mask = np.random.default_rng(0).random(n) > 0.5
    with enable_x64(True):
        assert (np.asarray(rank(jax.numpy.asarray(mask))) == np.cumsum(mask) - 1).all()
