"""torch's switches for reduced float32 products, and accumulators."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch
from fused_eager.fusion_rules.platforms import lowering_for
from fused_eager.fusion_rules.precision import accumulator, conv_precision, matmul_precision, rounded, switches
from jax.lax import Precision


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    level = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(level)


@pytest.mark.parametrize(("level", "want"), [
    ("highest", Precision.HIGHEST), ("high", Precision.HIGH), ("medium", Precision.DEFAULT)])
def test_matmul_follows_torch(level: str, want: Precision) -> None:
    torch.set_float32_matmul_precision(level)
    assert matmul_precision() == want
    assert ("float32_matmul_precision", level) in switches()


def test_convolutions_follow_cudnn_on_gpus_and_products_elsewhere() -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        with lowering_for("cuda"):
            assert conv_precision() == Precision.HIGH
        assert conv_precision() == Precision.HIGHEST
        before = switches()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        with lowering_for("cuda"):
            assert conv_precision() == Precision.HIGHEST
        assert switches() != before
    torch.set_float32_matmul_precision("medium")
    with lowering_for("tpu"):
        assert conv_precision() == Precision.DEFAULT
    assert conv_precision() == Precision.HIGHEST


def test_accumulators() -> None:
    wide = {torch.bfloat16: np.float32, torch.float16: np.float32, torch.float64: np.float64, torch.int8: np.int8}
    assert {d: accumulator(d) for d in wide} == wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_rounds_as_a_store_does(dtype: torch.dtype) -> None:
    # float16's subnormal numbers are float32's ordinary ones.
    x = torch.cat([torch.randn(1000) * 1e3, torch.randn(1000) * 3e-5, torch.tensor([3e-8, -2e-8, 65519.0, 65520.0])])
    got = np.asarray(jax.jit(lambda v: rounded(v * 1.0, dtype))(x.numpy()))
    assert torch.equal(torch.from_numpy(got.copy()), x.to(dtype).float())
