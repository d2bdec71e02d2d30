"""The pending stream: what has been recorded and not yet run, and what it reads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..devices.buffer import Buffer, Owner
from ..devices.device import Device
from ..devices.home import Home
from ..devices.host.device import HOST
from ..policy.allowance import Shadowed
from ..policy.policy import Policy
from .node import Hole, Node, Ref, Result, Use, place_of, places, start, starts, targets_of, views
from .trace import MEMORY, Step

if TYPE_CHECKING:
    import jax

    from ..config import Config


class NativeInput:
    """A value that lies in a native storage: `home` at `offset` bytes. `array` once it has been handed to JAX."""

    __slots__ = ("array", "home", "offset", "storage", "vid")
    kind = "native"

    def __init__(self, vid: int, home: Home, storage: torch.UntypedStorage, offset: int):
        self.vid = vid
        self.home = home
        self.storage = storage
        self.offset = offset
        self.array: jax.Array | None = None


class DeviceInput:
    """A value that an earlier flush left on the device; `origin` is (run, value number) of its making.

    `array` is None where a shadowed stream has read it at home.
    """

    __slots__ = ("array", "buffer", "home", "origin", "vid")
    kind = "device"

    def __init__(self, vid: int, home: Home, buffer: Buffer, array: jax.Array | None, origin: tuple[int, int] | None):
        self.buffer = buffer
        self.vid = vid
        self.home = home
        self.array = array
        self.origin = origin


class Streams:
    """All streams that live. Other threads may open theirs while somebody goes through them."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Stream]] = {}

    def add(self, stream: Stream) -> None:
        """Count one more, for as long as anybody refers to it."""
        # Each step is one of the interpreter's own: a lock might be held when the process forks.
        ref = weakref.ref(stream, lambda gone: self.refs.pop(id(gone), None))
        self.refs[id(ref)] = ref

    def __iter__(self) -> Iterator[Stream]:
        return iter([stream for r in list(self.refs.values()) if (stream := r()) is not None])


STREAMS = Streams()


@dataclass(eq=False, slots=True)
class Stream(Owner):
    """The append-only record of one thread, or of all ops of an accelerator, since its last flush.

    Values are numbered in the order of their appearance (`vid`), inputs and results alike, so that equal programs
    give equal streams whatever tensors they use.
    """

    config: Config
    device: Device = HOST  # whose ops these are
    nodes: list[Node] = field(default_factory=list)
    inputs: list[NativeInput | DeviceInput] = field(default_factory=list)
    vids: int = 0
    epoch: int = 0
    pending: dict[int, Buffer] = field(default_factory=dict)  # by storage address
    natives: dict[int, dict[Hashable, NativeInput]] = field(default_factory=dict)
    reads: dict[int, DeviceInput] = field(default_factory=dict)
    unfinished: object = None  # the flush that an interrupt has left in the middle, if one has: an `Execution`
    policy: Policy = field(default_factory=Policy)
    at: Step = field(default_factory=lambda: MEMORY.root)  # where in the trace memory it is
    thread: int = field(default_factory=threading.get_ident)  # whose ops these are
    root: Step = field(default_factory=lambda: MEMORY.root)  # of the tree in which this one began
    ended: Step | None = None  # where the last stream ended
    guess: Step | None = None  # how this one began when it last came after that
    shadowed: Shadowed | None = None  # nothing is compiled for it: ATen has run what is recorded
    first: Step | None = None  # the step of its first op
    strayed: bool = False  # its last op is one of a length that has not come before
    ahead: bool = False  # its tensors only stand for values: nobody looks at their memory
    urgent: frozenset[int] = frozenset()  # values that are waited for, by who ends the stream: they come first
    after_read: bool = False  # the one before it ended because the program read a value

    def __post_init__(self) -> None:
        STREAMS.add(self)

    def new_vid(self) -> int:
        """The next value number."""
        vid = self.vids
        self.vids += 1
        return vid

    def expected(self) -> Step | None:
        """The step that came next last time."""
        return self.at.likely if self.at.depth else self.guess

    def went(self, step: Step) -> None:
        """Note in the trace memory that `step` is what came next."""
        if not self.at.depth:
            self.first = step
        self.at.likely = step
        if self.ended is not None:
            self.ended.then, self.ended = step, None
        self.at = step

    def warm(self) -> None:
        """A stream that begins like this one is to be held back until it ends: it is compiled, or soon is."""
        if self.first is not None:
            self.first.warm = True

    def reset(self) -> None:
        """Start the next epoch: the stream is empty, numbers start at zero."""
        self.nodes = []
        self.inputs = []
        self.pending = {}
        self.natives = {}
        self.reads = {}
        self.vids = 0
        self.shadowed = self.first = None
        self.strayed = False
        self.urgent = frozenset()
        self.epoch += 1
        # What was forgotten in between must not come back by way of what used to follow what.
        known = self.root is MEMORY.root
        self.ended, self.guess = (self.at, self.at.then) if known else (None, None)
        self.root = self.at = MEMORY.root


# Who works on a stream knows its nodes from here.
__all__ = [
    "STREAMS",
    "DeviceInput",
    "Hole",
    "NativeInput",
    "Node",
    "Ref",
    "Result",
    "Stream",
    "Streams",
    "Use",
    "place_of",
    "places",
    "start",
    "starts",
    "targets_of",
    "views",
]
