"""Configurations of kernels on the device: measured by the host for a device over a CPU, and else on the device."""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax.experimental import pallas as pl

from fused_eager import pallas_op
from fused_eager.frontends.device.doors import DOORS
from fused_eager.frontends.kernels import tuning

Tensor = torch.Tensor


@pallas_op("device_tests::doubled", configs=[{"block": 8}, {"block": 3}, {"block": 16}])
def doubled(x: Tensor, block: int = 2) -> Tensor:
    """Blocks of 3 do not reach the last row."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = (x.shape[0] // block,)
    return pl.pallas_call(kernel, grid=grid, in_specs=[spec], out_specs=spec, out_shape=out)(x)


def test_it_is_timed_where_it_runs() -> None:
    x = torch.randn(16, 4).to("tpu")
    assert tuning.device_of([x]) is tuning.HOST  # over a CPU
    assert tuning.device_of([x, torch.ones(1)]) is None
    found = doubled._tuned((x,), {}, DOORS[0].device)
    assert set(found.seconds) == {0, 2} and all(s > 0 for s in found.seconds.values())
    torch.testing.assert_close(doubled(x).cpu(), x.cpu() * 2)
    assert len(doubled.tuned) == 2  # the host's times, and the device's
