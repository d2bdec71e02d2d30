"""Trace memory: the streams of this process as one tree, so that a stream that comes again is followed.

Each `Step` is an op at its place in a stream; its children are the ops that have come next. Recording descends the
tree as it goes, so streams with a common beginning share it, and what has been worked out for a stream (its plan, its
executables) hangs at its last step: nothing has to be hashed to find it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..bounded import Bounded

if TYPE_CHECKING:
    from ..devices.home import Home
    from .node import Node
    from .opinfo import OpInfo
    from .structure import Call

LIMIT = 30_000  # steps; programs whose streams never repeat must not fill the memory
ENDINGS = 64  # ways to end at one step: which values are live then, which inputs may be overwritten

# Where the value of an operand is.
PENDING, NATIVE, DEVICE = "pending", "native", "device"

MISS = object()  # an op is not the one that came next last time


class Operand(NamedTuple):
    """A tensor argument as it was recorded: the value it sees, and where in it.

    `nbytes` is the size of its storage, `home` the form of the value if that is an input.
    """

    vid: int
    offset: int
    moves: bool  # the offset is a number of the region, not part of its structure
    nbytes: int
    where: str
    home: Home | None


class Step:
    """One op of a remembered stream: what recording it found out, and what has come after it."""

    __slots__ = (
        "call",
        "children",
        "compiled",
        "default",
        "depth",
        "info",
        "likely",
        "node",
        "operands",
        "reached",
        "ready",
        "spent",
        "then",
        "vids",
        "warm",
    )

    def __init__(self, info: Any, call: Any, node: Any, operands: tuple[Operand, ...], vids: int, depth: int):
        self.info: OpInfo = info
        self.call: Call = call
        self.node: Node = node
        self.operands = operands
        self.vids = vids  # values of the stream after this op
        self.depth = depth  # ops of the stream up to and with this one; 0 is the root
        self.default = torch.get_default_dtype()  # some ops read it
        self.compiled: object = None  # what the compiled front door has made of it; False: it leaves it to Python
        self.children: dict[Hashable, Step] = {}
        self.likely: Step | None = None  # the child that came last
        self.then: Step | None = None  # the first step of the stream that followed one which ended here
        self.ready: Bounded[Hashable, Any] = Bounded(ENDINGS)  # by ending: what runs the stream (`executing.load`)
        self.reached = 0  # of the first op of a stream: how many ops of it had been written down when it was given up
        self.spent = 0.0  # and the seconds that streams which begin with it have cost since one was last compiled
        self.warm = False  # of the first op of a stream: something that begins like that has been compiled, or is soon


def _root() -> Step:
    return Step(None, None, None, (), 0, 0)


class Memory:
    """The tree. When it is full it is forgotten and grows again; executables are kept elsewhere."""

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self.root = _root()
        self.size = 0

    def add(self, at: Step, key: Hashable, step: Step) -> Step:
        """The step after `at` for an op with this key: the one that is known, or `step`, known from now on."""
        known = at.children.get(key)
        if known is not None:
            known.operands = step.operands  # a parameter that was in native memory is on the device after a step
            return known
        if self.size >= self.limit:
            self.forget()
        self.size += 1
        at.children[key] = step
        return step

    def steps(self) -> Iterator[Step]:
        """All of them, the root first."""
        left = [self.root]
        while left:
            step = left.pop()
            left += step.children.values()
            yield step

    def forget(self) -> None:
        """Start again; streams under way go on in the old tree."""
        self.size, self.root = 0, _root()


MEMORY = Memory()
