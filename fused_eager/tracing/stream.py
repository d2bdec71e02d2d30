"""The pending stream and its few types: what has been recorded and not yet run."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._ops import OpOverload

from fused_eager.fusion_rules.geometry import Geometry
from fused_eager.fusion_rules.spec import Spec

from ..choosing.hotness import Spell
from ..choosing.pace import Pace
from ..memory.buffers import Buffer, Home, Owner
from .trace import MEMORY, Step

if TYPE_CHECKING:
    import jax

    from ..config import Config
    from ..running.run import Execution


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

    `array` is None where a witnessed stream has read it at home.
    """

    __slots__ = ("array", "buffer", "home", "origin", "vid")
    kind = "device"

    def __init__(self, vid: int, home: Home, buffer: Buffer, array: jax.Array | None, origin: tuple[int, int] | None):
        self.buffer = buffer
        self.vid = vid
        self.home = home
        self.array = array
        self.origin = origin


@dataclass(slots=True)
class Witnessed:
    """What the ops of a stream that is run as it is recorded (`recording.witness`) have taken and made."""

    seconds: float = 0.0
    held: int = 0  # bytes that lived when it was last looked at
    young: int = 0  # bytes that have come since
    granted: float = 0.0  # seconds that may go into writing it down, besides a share of the above,
    written: float = 0.0  # those that have gone into it,
    followed: float = 0.0  # and into following what was written down before:
    came: int = 0  # so many ops


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
    """The append-only record of one thread since its last flush.

    Values are numbered in the order of their appearance (`vid`), inputs and results alike, so that equal programs
    give equal streams whatever tensors they use.
    """

    config: Config
    nodes: list[Node] = field(default_factory=list)
    inputs: list[NativeInput | DeviceInput] = field(default_factory=list)
    vids: int = 0
    epoch: int = 0
    pending: dict[int, Buffer] = field(default_factory=dict)  # by storage address
    natives: dict[int, dict[Hashable, NativeInput]] = field(default_factory=dict)
    reads: dict[int, DeviceInput] = field(default_factory=dict)
    unfinished: Execution | None = None
    spell: Spell = field(default_factory=Spell)
    pace: Pace = field(default_factory=Pace)
    at: Step = field(default_factory=lambda: MEMORY.root)  # where in the trace memory it is
    thread: int = field(default_factory=threading.get_ident)  # whose ops these are
    root: Step = field(default_factory=lambda: MEMORY.root)  # of the tree in which this one began
    ended: Step | None = None  # where the last stream ended
    guess: Step | None = None  # how this one began when it last came after that
    witnessed: Witnessed | None = None  # nothing is compiled for it: ATen has run what is recorded
    first: Step | None = None  # the step of its first op
    strayed: bool = False  # its last op is one of a length that has not come before
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
        self.witnessed = self.first = None
        self.strayed = False
        self.epoch += 1
        # What was forgotten in between must not come back by way of what used to follow what.
        known = self.root is MEMORY.root
        self.ended, self.guess = (self.at, self.at.then) if known else (None, None)
        self.root = self.at = MEMORY.root
