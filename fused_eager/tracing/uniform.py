"""Uniform calls: pointwise calls that differ in nothing but the shape that all their tensors have.

What torch says of one holds for the others, so it need not be asked again (0.3 ms): lengths that keep changing, and
layers of many sizes, ask for little else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fused_eager.fusion_rules.spec import contiguous_strides

from ..bounded import Bounded
from .infer import Inferred
from .opinfo import OpInfo

_KNOWN: Bounded[Hashable, Inferred] = Bounded(4096)


def form(info: OpInfo, key: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Hashable | None:
    """What uniform calls have in common, from the key that `calls.take` made of one; None if this is not one.

    Contiguous tensors only, without sizes of 0 and 1: there is one way in which those lie in memory.
    """
    if not tensors or info.twin is None or torch.Tag.pointwise not in info.twin.tags:
        return None
    shape = tensors[0].shape
    if not shape or min(shape) < 2:
        return None
    strides = contiguous_strides(tuple(shape))
    if any(t.shape != shape or t.stride() != strides for t in tensors):
        return None
    common: list[Any] = [len(shape)]
    parts = iter(key)
    for part in parts:
        if type(part) is torch.Size:
            next(parts)  # the strides
        else:
            common.append(part)
    return tuple(common)


def recall(form: Hashable | None, tensors: Sequence[torch.Tensor]) -> Inferred | None:
    """What a uniform call returns, if that is known of another one."""
    found = _KNOWN.get(form)
    if found is None:
        return None
    shape = tuple(tensors[0].shape)
    strides = contiguous_strides(shape)
    return replace(found, fresh=tuple([replace(s, shape=shape, strides=strides) for s in found.fresh]))


def remember(form: Hashable | None, tensors: Sequence[torch.Tensor], inferred: Inferred) -> None:
    """Keep what torch says of a call, if its outputs are like its tensors."""
    if form is None or inferred.alias:
        return
    shape = tuple(tensors[0].shape)
    if all(s.shape == shape and s.strides == contiguous_strides(shape) for s in inferred.fresh):
        _KNOWN[form] = inferred
