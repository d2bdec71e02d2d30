"""Structure: what is known of a call by its structure alone (`calls` works it out)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.spec import Spec

from ..devices.home import Home
from .pattern import Row


class View(NamedTuple):
    """How a tensor argument of given size, strides and dtype is seen: `geometry` at offset 0, and the block it touches.

    `block` is the home of native memory read through it, and of a value that it overwrites whole; `covered` are the
    bytes of the storage that it then has to have (-1: it has gaps, so it never overwrites all).
    """

    geometry: Geometry
    block: Home
    itemsize: int
    covered: int
    spec: Spec


class Output(NamedTuple):
    """A new output: what to allocate, and the value that will fill it."""

    spec: Spec
    geometry: Geometry
    home: Home
    nbytes: int  # of the value


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about a call that its structure decides: remembered per (op, structural arguments, tensor specs)."""

    template: Any  # what is returned, with Fresh and Same leaves
    args: Any  # templates with Ref and Hole leaves
    kwargs: dict[str, Any]
    views: tuple[View, ...]
    outputs: tuple[Output, ...]
    written: tuple[int, ...]  # positions among the tensor arguments, in schema order
    overlapping: bool  # a written tensor overlaps itself
    alias: bool
    tiny: bool
    doubt: str  # why its first run has to be ATen's: there is no lowering, or shape inference cannot be trusted
    structure: int  # a number that stands for the memo key in node signatures
    taken: set[bytes]  # the kinds of its numbers that ATen takes, as far as it has been asked
    rows: tuple[Row, ...]  # what the arguments look like, and by name those given so
    named: tuple[tuple[str, tuple[Row, ...]], ...]
    unlike: str = ""  # what a rehearsal showed to be otherwise than shape inference says
