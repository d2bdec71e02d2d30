"""Tensors without elements: rare ops return, or refuse, what they do in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .programs import check, run, same_error


def f(*shape: int) -> torch.Tensor:
    return torch.ones(*shape) * 2


def none(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64) * 1


PROGRAMS: dict[str, Callable[[], Any]] = {
    "native_channel_shuffle of no image": lambda: torch.native_channel_shuffle(f(0, 4, 2, 2), 2),
    "native_channel_shuffle of no row": lambda: torch.native_channel_shuffle(f(2, 4, 0, 2), 2),
    "native_channel_shuffle of no channel": lambda: torch.native_channel_shuffle(f(2, 0, 2, 2), 2),
    "native_channel_shuffle": lambda: torch.native_channel_shuffle(torch.arange(16.0).view(1, 4, 2, 2) * 2, 2),
    "native_channel_shuffle of one group": lambda: torch.native_channel_shuffle(f(1, 4, 4), 1),
    "native_channel_shuffle of as many": lambda: torch.native_channel_shuffle(f(1, 4, 4), 4),
    "pixel_shuffle": lambda: F.pixel_shuffle(f(0, 4, 2, 2), 2),
    "group_norm": lambda: F.group_norm(f(2, 4, 0), 2),
    "conv2d": lambda: F.conv2d(f(0, 3, 4, 4), f(2, 3, 2, 2)),
    "grid_sample": lambda: F.grid_sample(f(0, 3, 4, 4), f(0, 2, 2, 2), align_corners=False),
    "fold": lambda: F.fold(f(0, 12, 9), (4, 4), 2),
    "cdist": lambda: torch.cdist(f(2, 0), f(3, 0)),
    "addmm": lambda: torch.addmm(f(2, 3), f(2, 0), f(0, 3)),
    "attention": lambda: F.scaled_dot_product_attention(f(1, 2, 0, 4), f(1, 2, 3, 4), f(1, 2, 3, 4)),
    "cross_entropy": lambda: F.cross_entropy(f(0, 3), none(0)),
    "cummax": lambda: f(3, 0).cummax(0),
    "kthvalue": lambda: f(0, 3).kthvalue(2, 1),
    "searchsorted": lambda: torch.searchsorted(f(0), f(2)),
    "bins": lambda: torch.histc(f(0)),
    "scatter_reduce": lambda: f(2, 3).scatter_reduce(1, none(2, 0), f(2, 0), "mean"),
    "put": lambda: f(2, 3).put(none(0), f(0)),
    "diag_embed": lambda: torch.diag_embed(f(0, 3)),
    "fft": lambda: torch.fft.fft(f(0, 3)),
    "fft of nothing": lambda: torch.fft.fft(f(3, 0)),
    "det": lambda: torch.linalg.det(f(0, 0)),
    "svd": lambda: torch.linalg.svd(f(0, 3)),
    "matrix_exp": lambda: torch.matrix_exp(f(0, 2, 2)),
    "std_mean": lambda: torch.std_mean(f(3, 0), 1),
    "max": lambda: f(0).max(),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_elements(name: str, mode: str) -> None:
    expected = run(PROGRAMS[name], "eager")
    if expected.error is not None:
        same_error(expected.error, run(PROGRAMS[name], mode).error)
    else:
        check(PROGRAMS[name], mode)
