"""Results: what a graph returns, of the memory that its slots hold.

To autograd it matters whether two results are one tensor, views of one memory, or neither. A gradient that only one
tensor holds becomes `.grad` as it is: two of them over the same memory would be scaled twice by what scales gradients
in place. And what is kept for the backward pass has to be known as a view of what the program can still write: so
autograd sees that it was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fused_eager.fusion_rules.geometry import Geometry, is_dense

from .stage import Slots, over
from .templates import Fetch, read

Tensor = torch.Tensor


@dataclass(slots=True)
class Results:
    """How results are made.

    Arguments:
        templates: what they are, in order.
        new: slots of memory that the graph has made.
        given: slots of its arguments.
        shown: how many of the results the program sees; those after them are kept for the backward pass.
        gradients: they are gradients.
    """

    templates: Sequence[Any]
    new: Collection[int]
    given: Collection[int]
    shown: int | None = None
    gradients: bool = False
    alone: frozenset[int] = field(init=False)  # slots of new memory that one result sees, and nobody else
    again: dict[int, int] = field(init=False)  # results that are an earlier one
    views: dict[int, int | None] = field(init=False)  # those to be views of an earlier one, or of an argument
    copied: set[int] = field(init=False)  # gradients to be in memory of their own

    def __post_init__(self) -> None:
        seen = Counter(read(self.templates))
        self.alone = frozenset(slot for slot, n in seen.items() if n == 1 and slot in self.new)
        self.again, self.views, self.copied = {}, {}, set()
        first: dict[Fetch, int] = {}
        over_slot: dict[int, list[int]] = {}
        for at, a in enumerate(self.templates):
            if type(a) is not Fetch:
                continue
            if a in first:
                self.again[at] = first[a]
                continue
            before = over_slot.setdefault(a.slot, [])
            if self.gradients and any(_overlap(a, self.templates[k]) for k in before):
                self.copied.add(at)
            elif self.shown is not None and at >= self.shown and a.geometry is not None:
                if before and before[0] < self.shown:
                    self.views[at] = before[0]
                elif a.slot in self.given:
                    self.views[at] = None
            first[a] = at
            before.append(at)

    def own(self, slots: Slots) -> list[Any]:
        """The results, but for those that `finish` fills in. To be called where views are made without autograd."""
        made = []
        for at, a in enumerate(self.templates):
            if type(a) is not Fetch:
                made.append(a)
            elif at in self.again or at in self.views:
                made.append(None)
            else:
                held, g = slots[a.slot], a.geometry
                is_it = g is None or (a.slot in self.alone and _is_all_of(held, g))
                t = held if is_it else over(held, g)  # type: ignore[arg-type]
                made.append(t.clone() if at in self.copied else t)
        return made

    def finish(self, made: list[Any], slots: Slots) -> Any:
        """All results, as a list or tuple."""
        for at, before in self.views.items():
            a = self.templates[at]
            held = slots[a.slot]
            made[at] = _view(held if before is None else made[before], held, a.geometry)
        for at, before in self.again.items():
            made[at] = made[before]
        return type(self.templates)(made)  # type: ignore[call-arg]


def _view(t: Tensor, held: Tensor, g: Geometry) -> Tensor:
    """What `over(held, g)` is, as a view of `t`, which lies in the same memory: they count writes together."""
    if t.dtype is not g.dtype:
        t = t.conj() if t.is_conj() else t
        t = t._neg_view() if t.is_neg() else t
        count = t.untyped_storage().nbytes() // g.dtype.itemsize * g.dtype.itemsize // t.itemsize
        t = t.as_strided((count,), (1,), 0).view(g.dtype)
    out = t.as_strided(g.size, g.stride, held.storage_offset() * held.itemsize // g.dtype.itemsize + g.offset)
    out = out.conj() if out.is_conj() != g.conj else out
    return out._neg_view() if out.is_neg() != g.neg else out


def _is_all_of(t: Tensor, g: Geometry) -> bool:
    """Whether a tensor, which begins where its storage does, is this view of it."""
    return t.shape == g.size and t.stride() == g.stride and t.dtype is g.dtype and not (g.offset or g.conj or g.neg)


def _overlap(a: Fetch, b: Fetch) -> bool:
    """Whether two dense results over one slot share memory. (Others are no tensor's `.grad` as they are.)"""
    if a.geometry is None or b.geometry is None:
        return True
    ranges = []
    for g in (a.geometry, b.geometry):
        if not is_dense(g.size, g.stride):
            return False
        begin = g.offset * g.dtype.itemsize
        ranges.append((begin, begin + torch.Size(g.size).numel() * g.dtype.itemsize))
    (begin, end), (other, ends) = ranges
    return begin < ends and other < end
