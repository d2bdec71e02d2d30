"""Numbers: whether ATen takes the numbers that a call hands it, asked once for all of their kind.

A number is an input of a region, so a call that comes with another one is the same call. But ATen refuses some: one
that does not fit the dtype, a width below zero. What it refuses depends on the sign of a number and on which dtypes
hold it: that is its kind, and a call remembers of which kinds ATen has been asked.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from fused_eager.fusion_rules.rule import OpClass, rule_for

from .opinfo import OpInfo
from .rehearsal import LARGE, rehearsed

Number = float | int

# Up to where dtypes reach, on either side of zero. The compiled follower has the same (`follower.spec`).
BOUNDS = (
    127.0, 128.0, 255.0, 32767.0, 32768.0, 65504.0, 65535.0, 2147483647.0, 2147483648.0, 4294967295.0,
    math.nextafter(2.0**63, 0), torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max, sys.float_info.max,
)  # fmt: skip
_NAN, _ZERO, _FIRST = 0, 1, 2


def kind(number: Number) -> int:
    """The kind of a number, below 256."""
    if number == 0:
        return _ZERO
    if number != number:
        return _NAN
    reach = bisect_left(BOUNDS, abs(number))
    return _FIRST + reach + (len(BOUNDS) + 1 if number < 0 else 0)


def kinds(numbers: Sequence[Number]) -> bytes:
    """The kinds of a call's hoisted numbers, in order."""
    return bytes([kind(n) for n in numbers])


def are_taken(info: OpInfo, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], made: torch.dtype) -> bool:
    """Whether ATen takes the numbers of a call that fills or makes tensors of dtype `made`. False where it refuses the
    call, or might: then its own run has to tell."""
    rule = rule_for(info.twin) if info.twin is not None else None
    if rule is not None and rule.cls is OpClass.FACTORY:
        numbers = [n for i in info.hoisted for n in _numbers(args[i] if i < len(args) else kwargs.get(info.names[i]))]
        return all(rehearsed(torch.full, ((2,), n), {"dtype": made}, []) for n in numbers)
    if rule is not None and rule.defines:
        return True
    # Lists of an optimizer's too: whole models' parameters are not to be fetched from a device for their numbers.
    by_element = rule is not None and rule.cls in (OpClass.POINTWISE, OpClass.OPTIMIZER)
    if not by_element and sum(t.numel() for t in tensors) > LARGE:
        return False
    return rehearsed(info.op, args, kwargs, tensors, small=by_element)


def _numbers(given: Any) -> list[Number]:
    return [n for n in (given if isinstance(given, (list, tuple)) else [given]) if type(n) in (int, float)]
