"""Interpolation, sampling and unfolding against ATen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fused_eager.fusion_rules import taps
from fused_eager.fusion_rules.lowering import NoLowering
from fused_eager.fusion_rules.taps import Taps

from .errors import assert_same, lowered
from .harness import sweep

A = torch.ops.aten
BEYOND = (1.9, 0.6)  # 13 rows of 5 at a scale of 1.9: the last ones lie outside of the input
SIZES = [
    ([10, 14], None), ([5, 7], None), ([3, 9], None), ([13, 4], BEYOND), ([13, 4], (2.7, 0.6)), ([1, 1], None),
    ([40, 5], None),
]  # fmt: skip
ALIGNING = {"upsample_bilinear2d": True, "upsample_bicubic2d": True, "_upsample_bilinear2d_aa": True,
            "_upsample_bicubic2d_aa": True, "upsample_nearest2d": False, "_upsample_nearest_exact2d": False}


# Of float32, what differs from float64 is rounding: two sizes in every run.
DTYPES_AND_SIZES = [
    pytest.param(dtype, size, marks=[pytest.mark.slow] * (dtype is torch.float32 and i not in (0, 3)))
    for dtype in (torch.float32, torch.float64)
    for i, size in enumerate(SIZES)
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("dtype", "size"), DTYPES_AND_SIZES, ids=str)
@pytest.mark.parametrize("name", ALIGNING)
def test_two_dimensions(name: str, dtype: torch.dtype, size: Any) -> None:
    out, scales = size
    if name.endswith("_aa") and scales == BEYOND:
        pytest.skip("eager takes weights that nobody has written: its result changes with what was freed before")
    x = torch.randn(2, 3, 5, 7, dtype=dtype)
    forward, backward = getattr(A, name).default, getattr(A, f"{name}_backward").default
    for align in [False, True] if ALIGNING[name] else [None]:
        rest = ([] if align is None else [align]) + list(scales or ())
        want = forward(x, out, *rest)
        torch.testing.assert_close(lowered(forward, want, x, out, *rest)[0], want, rtol=1e-4, atol=1e-5)
        g = torch.randn_like(want)
        want = backward(g, out, list(x.shape), *rest)
        torch.testing.assert_close(lowered(backward, want, g, out, list(x.shape), *rest)[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("out", [[9], [4], [15]], ids=str)
def test_one_and_three_dimensions(out: list[int]) -> None:
    line, volume = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(1, 2, 3, 7, 4, dtype=torch.float64)
    for name, x, sizes, rest in [("upsample_linear1d", line, out, [True]), ("upsample_nearest1d", line, out, []),
                                 ("upsample_trilinear3d", volume, [5, *out, 4], [False]),
                                 ("_upsample_nearest_exact3d", volume, [5, *out, 2], [])]:
        assert_same(getattr(A, name).default, x, sizes, *rest)
        g = torch.randn_like(getattr(A, name)(x, sizes, *rest))
        assert_same(getattr(A, f"{name}_backward").default, g, sizes, list(x.shape), *rest)


def test_bytes() -> None:
    x = torch.randint(0, 255, (1, 3, 5, 7), dtype=torch.uint8)
    assert_same(A.upsample_nearest2d.default, x, [9, 9])
    with pytest.raises(NoLowering):
        lowered(A.upsample_bilinear2d.default, x, x, [9, 9], False)


def test_an_infinite_pixel_stays_where_it_is() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 3, 3] = torch.inf
    x[0, 0, 1, 1] = -torch.inf
    assert_same(A.upsample_bilinear2d_backward.default, x, [4, 4], [1, 1, 9, 9], True)


@pytest.mark.parametrize("terms", [0, 8])
def test_transposed_maps(terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "MOST_TERMS", terms)
    rng = np.random.default_rng(0)
    index = rng.integers(-1, 6, (3, 11))
    weight = rng.normal(size=index.shape)
    dense = np.zeros((11, 6))
    for k, i in np.ndindex(*index.shape):
        if index[k, i] >= 0:
            dense[i, index[k, i]] += weight[k, i]
    x, y = rng.normal(size=(2, 6, 3)).astype(np.float32), rng.normal(size=(2, 11, 3)).astype(np.float32)
    there = Taps(6, index, weight)
    np.testing.assert_allclose(taps.apply_taps(x, 1, there), np.einsum("oi,nic->noc", dense, x), rtol=1e-4, atol=1e-5)
    back = taps.apply_taps(y, 1, there.transposed())
    np.testing.assert_allclose(back, np.einsum("oi,noc->nic", dense, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("args", [([3, 3], [1, 1], [1, 1], [1, 1]), ([2, 3], [2, 1], [0, 2], [3, 2])], ids=str)
def test_columns(args: Any) -> None:
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    assert_same(A.im2col.default, x, *args)
    assert_same(A.im2col.default, x[0], *args)
    columns = torch.randn_like(A.im2col(x, *args))
    assert_same(A.col2im.default, columns, [8, 9], *args)
    assert_same(A.col2im.default, columns[0], [8, 9], *args)


def test_sweep() -> None:
    mode = sweep(["nn.functional.upsample_bilinear"], [torch.float64], limit=2)
    assert mode.checked and not mode.problems
