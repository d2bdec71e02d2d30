"""Node: one recorded op, what it reads, and what it makes."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.spec import Spec

from ..devices.home import Home


@dataclass(frozen=True, slots=True)
class Ref:
    """In an argument template: the node's use number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Hole:
    """In an argument template: the node's hoisted scalar number `index`, of Python type `kind`."""

    index: int
    kind: type


class Use(NamedTuple):
    """A read: the view `geometry` of the value `vid`.

    With `start`, the view lies in a block of `extent` elements that begins where the node's scalar number `start`
    says: a slice that moves from round to round is one computation.
    """

    vid: int
    geometry: Geometry
    start: int | None = None
    extent: int = 0


class Result(NamedTuple):
    """One output of a node: the value `vid`, whose home is `home`.

    The output is the view `geometry` of that home. `base` is the value of which the rest of the home is taken, None
    if the output covers it all. Where it begins in its home may be a number of the node (`starts`).
    """

    vid: int
    home: Home
    geometry: Geometry
    base: int | None
    spec: Spec


class Node:
    """One recorded op. Immutable after recording; equal signatures mean equal computations on equal positions.

    `op` is the overload the program called, `twin` the functional overload that computes it (None: only ATen can).
    `args` and `kwargs` are templates with `Ref` and `Hole` leaves, in the order of the schema of `op`.
    """

    __slots__ = (
        "args",
        "default",
        "kwargs",
        "number",
        "op",
        "place",
        "results",
        "scalars",
        "signature",
        "targets",
        "twin",
        "uses",
    )

    def __init__(
        self,
        number: int,
        op: OpOverload,
        twin: OpOverload | None,
        args: Any,
        kwargs: dict[str, Any],
        uses: tuple[Use, ...],
        scalars: list[float | int],
        results: tuple[Result, ...],
        targets: tuple[int, ...],
        signature: Hashable,
        place: tuple[Any, ...] | None,
        default: torch.dtype | None = None,
    ):
        self.number = number  # stands for `op` where only equality counts
        self.op = op
        self.twin = twin
        self.args = args
        self.kwargs = kwargs
        self.uses = uses
        self.scalars = scalars
        self.results = results
        self.targets = targets  # the uses that the op writes, in the order of the last results
        self.signature = signature
        self.place = place
        self.default = default or torch.get_default_dtype()  # when it was recorded: some ops read it

    def with_scalars(self, scalars: list[float | int]) -> Node:
        """The same op with other numbers."""
        return Node(
            self.number,
            self.op,
            self.twin,
            self.args,
            self.kwargs,
            self.uses,
            scalars,
            self.results,
            self.targets,
            self.signature,
            self.place,
            self.default,
        )

    def with_parts(self, uses: tuple[Use, ...], results: tuple[Result, ...]) -> Node:
        """The same op on other shapes."""
        other = copy.copy(self)
        other.uses, other.results = uses, results
        return other


def starts(node: Node) -> list[int | None]:
    """For each result: which of the node's scalars says where in its home it begins; None where its geometry does.

    A part that is written may begin elsewhere in the next round if the part that is read of it may.
    """
    found: list[int | None] = [None] * (len(node.results) - len(node.targets))
    for position, result in zip(node.targets, node.results[len(found) :], strict=True):
        found.append(start(node.uses[position], result))
    return found


def start(use: Use, result: Result) -> int | None:
    """The same for one result and the read of what it overwrites."""
    return use.start if result.base is not None and result.geometry.dtype == result.home[0] else None


def place_of(node: Node, use: Use) -> Geometry:
    """Where a read lies in its home, with the offset that this round has."""
    return use.geometry if use.start is None else use.geometry._replace(offset=int(node.scalars[use.start]))


def targets_of(node: Node) -> dict[int, tuple[int, Geometry]]:
    """For each use that is written: the value of which a part is overwritten, all of which goes on, and where it is."""
    split = len(node.results) - len(node.targets)
    found = {}
    for position, result, place in zip(node.targets, node.results[split:], places(node)[split:], strict=True):
        use = node.uses[position]
        found[position] = (use.vid, place_of(node, use)) if result.base is None else (result.base, place)
    return found


def places(node: Node) -> list[Geometry]:
    """Where each result lies in its home, with the offset that this round has."""
    return [
        r.geometry if at is None else r.geometry._replace(offset=int(node.scalars[at]))
        for r, at in zip(node.results, starts(node), strict=True)
    ]


def views(node: Node) -> Hashable:
    """How a node sees what it reads and makes, whichever values those are."""
    return tuple([use[1:] for use in node.uses]), tuple([(r.home, r.geometry) for r in node.results])
