"""Modules of torch.nn that torch's own suite (module_db) leaves out: how each is made and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import FunctionInput, ModuleInput

Make = Callable[..., torch.Tensor]


def _pooled(pool: Callable[..., Any], t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a max-pool returns, the places of its maxima among it: the arguments of an unpool."""
    with torch.no_grad():
        out, places = pool(t, 2, 2, return_indices=True)
    return out.requires_grad_(t.requires_grad), places


def _call(*args: Any, **kwargs: Any) -> FunctionInput:
    return FunctionInput(*args, **kwargs)


def more(make: Make) -> list[tuple[type[nn.Module], ModuleInput]]:
    """The rows; `make(*shape)` gives an input of the dtype at hand."""
    image, signal, volume = make(2, 4, 6, 6), make(2, 4, 8), make(2, 4, 4, 4, 4)
    words = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]])
    offsets = torch.tensor([0, 3])
    rows: list[tuple[type[nn.Module], FunctionInput, FunctionInput]] = [
        (nn.AdaptiveLogSoftmaxWithLoss, _call(8, 20, [4, 10]), _call(make(6, 8), torch.arange(0, 18, 3))),
        *[(c, _call(0.3), _call(make(3, 5))) for c in (nn.AlphaDropout, nn.Dropout, nn.FeatureAlphaDropout)],
        (nn.Dropout, _call(0.5, inplace=True), _call(make(3, 5).detach())),
        (nn.Dropout1d, _call(0.3), _call(signal)),
        (nn.Dropout2d, _call(0.3), _call(image)),
        (nn.Dropout3d, _call(0.3), _call(volume)),
        (nn.ChannelShuffle, _call(2), _call(image)),
        (nn.CosineSimilarity, _call(dim=1, eps=1e-6), _call(make(3, 5), make(3, 5))),
        (nn.CrossMapLRN2d, _call(3), _call(image)),
        *[(nn.EmbeddingBag, _call(10, 3, mode=m), _call(words)) for m in ("sum", "mean", "max")],
        (nn.EmbeddingBag, _call(10, 3, mode="sum", include_last_offset=False), _call(words.flatten(), offsets)),
        (nn.EmbeddingBag, _call(10, 3, mode="mean", padding_idx=2), _call(words)),
        (nn.Flatten, _call(), _call(image)),
        (nn.Unflatten, _call(1, (2, 2)), _call(signal)),
        (nn.Fold, _call((4, 5), (2, 2)), _call(make(1, 12, 12))),
        (nn.Unfold, _call((2, 3), padding=1, stride=2), _call(image)),
        (nn.Hardsigmoid, _call(), _call(make(3, 5))),
        (nn.Hardsigmoid, _call(inplace=True), _call(make(3, 5).detach())),
        (nn.Identity, _call(), _call(image)),
        (nn.LazyBatchNorm1d, _call(), _call(signal)),
        (nn.LazyBatchNorm2d, _call(), _call(image)),
        (nn.LazyBatchNorm3d, _call(), _call(volume)),
        (nn.LazyInstanceNorm1d, _call(), _call(signal)),
        (nn.LazyInstanceNorm2d, _call(), _call(image)),
        (nn.LazyInstanceNorm3d, _call(), _call(volume)),
        (nn.LazyLinear, _call(4), _call(make(3, 5))),
        (nn.MaxUnpool1d, _call(2), _call(*_pooled(nn.functional.max_pool1d, signal))),
        (nn.MaxUnpool2d, _call(2), _call(*_pooled(nn.functional.max_pool2d, image))),
        (nn.MaxUnpool3d, _call(2), _call(*_pooled(nn.functional.max_pool3d, volume))),
        (nn.NLLLoss2d, _call(), _call(make(2, 4, 3, 3), torch.arange(18).reshape(2, 3, 3) % 4)),
        *[(nn.PairwiseDistance, _call(p=p, keepdim=k), _call(make(3, 5), make(3, 5)))
          for p, k in ((2.0, False), (1.0, True), (3.5, False))],
        (nn.PixelShuffle, _call(2), _call(image)),
        (nn.PixelUnshuffle, _call(3), _call(image)),
        (nn.RReLU, _call(0.1, 0.4), _call(make(3, 5))),
        (nn.RReLU, _call(inplace=True), _call(make(3, 5).detach())),
        (nn.TripletMarginLoss, _call(1.0, p=2), _call(make(3, 5), make(3, 5), make(3, 5))),
        (nn.TripletMarginLoss, _call(0.5, p=1, swap=True, reduction="none"), _call(make(3, 5), make(3, 5), make(3, 5))),
        (nn.TripletMarginWithDistanceLoss, _call(swap=True), _call(make(3, 5), make(3, 5), make(3, 5))),
        *[(nn.Upsample, _call(scale_factor=2, mode=m), _call(image)) for m in ("nearest", "bilinear", "bicubic")],
        (nn.Upsample, _call(size=5, mode="linear", align_corners=True), _call(signal)),
        (nn.Upsample, _call(size=(3, 5, 2), mode="trilinear"), _call(volume)),
        (nn.UpsamplingBilinear2d, _call(scale_factor=2), _call(image)),
        (nn.UpsamplingNearest2d, _call(size=(9, 5)), _call(image)),
        (nn.TransformerDecoder, _call(nn.TransformerDecoderLayer(8, 2, 16), 2), _call(make(3, 2, 8), make(4, 2, 8))),
        (nn.Sequential, _call(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)), _call(make(3, 5))),
    ]
    return [(cls, ModuleInput(made, called)) for cls, made, called in rows]
