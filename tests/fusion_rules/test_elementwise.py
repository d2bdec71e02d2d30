"""Conversions and selects that the pointwise lowerings share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.elementwise import as_array, convert, narrow, need, together, where
from fused_eager.fusion_rules.lowering import Context, NoLowering, apply_rule
from fused_eager.fusion_rules.rule import OpClass, Promote, Rule
from fused_eager.fusion_rules.spec import spec_of

from fused_eager.xla import enable_x64

BEYOND = [math.nan, math.inf, -math.inf, 3e9, -3e9, 300.0, -1.7, 70001.0, 1e18, 5e9, -5e9, -129.0, 1e19, -0.0, 2.5]


@pytest.mark.parametrize("target", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16])
@pytest.mark.parametrize("source", [torch.float32, torch.float64])
def test_floats_become_integers_as_on_x86(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.tensor(BEYOND, dtype=source)
    with enable_x64(True):
        got = np.asarray(jax.jit(lambda v: convert(v, target))(x.numpy()))
    assert got.tolist() == x.to(target).tolist()


def test_float8_saturates_as_in_torch() -> None:
    x = torch.tensor([500.0, -1e9, math.inf, 448.0, 460.0, 0.3, math.nan])
    got = jax.jit(lambda v: convert(v, torch.float8_e4m3fn))(x.numpy())
    want = x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.asarray(got).view(np.uint8).tolist() == want.tolist()


def test_a_bool_in_a_product_keeps_nan() -> None:
    mask, x = np.array([False, False, True]), np.array([np.nan, np.inf, 2], np.float32)
    got = np.asarray(jax.jit(lambda m, v: v * convert(m, torch.float32))(mask, x))
    assert np.isnan(got[:2]).all() and got[2] == 2


@pytest.mark.parametrize("promote", [Promote.DEFAULT, None])
def test_a_bool_that_a_row_promotes_keeps_nan(promote: Promote | None) -> None:
    row = Rule("aten.mul.Tensor", OpClass.POINTWISE, lambda cx, x, y: x * as_array(y, x.dtype), promote)
    cx = Context((spec_of(torch.ones(4)),))
    mask, x = np.array([False, False, False, True]), np.array([np.nan, np.inf, -1, 2], np.float32)
    got = np.asarray(jax.jit(lambda x, m: apply_rule(row, cx, [x, m], {}))(x, mask))
    assert np.isnan(got[:2]).all() and got[3] == 2
    assert got[2] == 0 and np.signbit(got[2])  # -1 * 0


def test_numbers_wrap_as_a_c_cast_does() -> None:
    assert as_array(300, np.uint8) == 44 and as_array(-1, np.uint8) == 255 and as_array(2**63, np.int64) == -(2**63)


def test_where_broadcasts_and_takes_the_dtype_of_the_array() -> None:
    got = where(jnp.array([[True], [False]]), jnp.arange(3, dtype=jnp.int8), 7)
    assert got.dtype == jnp.int8 and got.tolist() == [[0, 1, 2], [7, 7, 7]]
    assert [x.shape for x in together(jnp.ones((2, 1)), 3, jnp.ones(4))] == [(2, 4)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rounds_and_stays_wide(dtype: torch.dtype) -> None:
    cx = Context((spec_of(torch.ones(1, dtype=dtype)),))
    x = torch.linspace(-3, 70000, 50)
    got = jax.jit(lambda v: narrow(cx, v))(x.numpy())
    assert got.dtype == np.float32 and np.asarray(got).tolist() == x.to(dtype).float().tolist()
    assert narrow(cx, 0.7) == float(torch.tensor(0.7, dtype=dtype))
    assert narrow(Context((spec_of(torch.ones(1)),)), 0.7) == 0.7


def test_need_declines_with_its_reason() -> None:
    need(True, "never")
    with pytest.raises(NoLowering, match="because"):
        need(False, "because")
