"""Call sites: the line of the user's program that an op came from, the module it belongs to, and whose backward it is.

The line alone is found for every op, so it has to be cheap. The rest is looked for where the event log asks for
details (`LOG.detailed`): with a report file, in `explain`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from ..bounded import Bounded
from ..folder import FOLDERS

_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, *FOLDERS, "<frozen")
_is_internal: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a program. `file` is "?" where no Python frame of the user's is on the stack (an engine's thread).

    `module` is the path of the innermost `nn.Module` whose forward was running, as in `Net.layers.0.attention`; empty
    outside of modules, and where nobody asked for details. `backward` says that autograd ran the op for this line.
    """

    file: str
    line: int
    function: str
    module: str = ""
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


UNKNOWN = Site("?", 0, "?")


class Place(NamedTuple):
    """What `here` returns when details are wanted: (code, line), as always, and the rest of a `Site`.

    `caller` is the line that was running: for a gradient, that of `backward()`.
    """

    code: CodeType
    line: int
    module: str
    backward: bool
    caller: tuple[CodeType, int] | None


_details = 0  # how many have asked for details


def here() -> tuple[CodeType, int] | Place | None:
    """The innermost frame outside torch and this library, as (code, line): cheap enough for every op."""
    frame: FrameType | None = sys._getframe(1)
    if _details:
        return _in_detail(frame)
    return _line(frame)


def is_at(place: tuple[Any, ...] | None) -> bool:
    """Whether `here` would return `place`: quicker, where the op was called by the program itself."""
    expected: tuple[Any, ...] | None = place
    if _details and place is not None:
        if type(place) is not Place:
            return False  # recorded when nobody wanted to know more
        expected = place.caller
    frame: FrameType | None = sys._getframe(_TO_PROGRAM)
    if expected is not None and frame is not None and frame.f_code is expected[0]:
        if frame.f_lineno != expected[1]:
            return False
    elif _line(frame) != expected:
        return False
    if _details and type(place) is Place and not place.backward:
        _forward.add(place)
    return True


_TO_PROGRAM = 6  # frames from `is_at` to the program: follow, record, and three of the front door


def caller() -> Site:
    """The line of the program that is running: of a flush, a wait, or whatever is no op."""
    return describe(_line(sys._getframe(1)))


def _line(frame: FrameType | None) -> tuple[CodeType, int] | None:
    known = _is_internal
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        internal = known.get(file)
        if internal is None:
            internal = known[file] = file.startswith(_INTERNAL)
        if not internal:
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def is_internal(file: str) -> bool:
    """Whether code of this file is torch's or this library's."""
    found = _is_internal.get(file)
    if found is None:
        found = _is_internal[file] = file.startswith(_INTERNAL)
    return found


# Places by line, of files that nobody has written: the code of graphs.
_STANDING: Bounded[str, dict[int, Place]] = Bounded(1024)


def stand_for(file: str, places: dict[int, Place]) -> None:
    """From here on `describe` tells of `places`, by line, where it would tell of lines in `file`."""
    _STANDING[file] = places


def describe(place: tuple[Any, ...] | None) -> Site:
    """The `Site` of what `here` returned."""
    if place is None:
        return UNKNOWN
    standing = _STANDING.get(place[0].co_filename)
    if standing is not None:
        place = standing.get(place[1], place)
    if type(place) is Place:
        return Site(place.code.co_filename, place.line, place.code.co_name, place.module, place.backward)
    return Site(place[0].co_filename, place[1], place[0].co_name)


@contextmanager
def detailed() -> Iterator[None]:
    """In the body, `here` returns a `Place`."""
    ask_for_details(1)
    try:
        yield
    finally:
        ask_for_details(-1)


def ask_for_details(by: int) -> None:
    """Count one more (1) or one less (-1) who wants details."""
    global _details
    _details += by


# ---- details -----------------------------------------------------------------------------------------------------

REMEMBERED = 1 << 16  # forward ops of one thread whose lines are kept for the backward pass
NEAR = 8  # how far a recorded op may be from a view whose gradient it is to name
_CALL = torch.nn.Module._call_impl.__code__
_sequence = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
_current_node = torch._C._current_autograd_node  # type: ignore[attr-defined]


class _Forward(threading.local):
    """The forward lines of one thread by autograd's sequence number, which is what ties a gradient to its op.

    A ring: number n lies at n % REMEMBERED.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = [-1] * REMEMBERED
        self.places: list[Place | None] = [None] * REMEMBERED

    def add(self, place: Place) -> None:
        """Remember the line of an op for its gradient. The first op after autograd made a node is the node's."""
        number = _sequence() - 1
        at = number % REMEMBERED
        if self.numbers[at] != number and torch.is_grad_enabled():
            self.numbers[at], self.places[at] = number, place

    def of(self, number: int) -> Place | None:
        """The line of the op that autograd's node `number` is for; None if it was not recorded."""
        at = number % REMEMBERED
        return self.places[at] if self.numbers[at] == number else None

    def near(self, number: int) -> Place | None:
        """The line on both sides of an op that was not recorded: view ops are not."""
        before = next((p for n in range(number - 1, number - NEAR, -1) if (p := self.of(n))), None)
        after = next((p for n in range(number + 1, number + NEAR) if (p := self.of(n))), None)
        return before if before is not None and after is not None and before[:2] == after[:2] else None


_forward = _Forward()


def _in_detail(frame: FrameType | None) -> Place | None:
    caller = _line(frame)
    node: Any = _current_node()
    if node is not None:
        number = node._sequence_nr()
        found = _forward.of(number) or _forward.near(number)
        if found is not None:
            return Place(found.code, found.line, found.module, True, caller)
    if caller is None:
        return None
    if node is not None:
        return Place(*caller, "", True, caller)
    modules: list[Any] = []
    while frame is not None:
        if frame.f_code is _CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    place = Place(*caller, _path(modules), False, caller)
    _forward.add(place)
    return place


def _path(modules: list[Any]) -> str:
    """The path of the innermost of `modules` (innermost first) in the outermost one, which goes by its type."""
    if not modules:
        return ""
    words = [type(modules[-1]).__name__]
    for inner, outer in zip(modules[-2::-1], modules[:0:-1], strict=True):
        words.append(_name_in(outer, inner))
    return ".".join(words)


def _name_in(outer: Any, inner: Any) -> str:
    for name, child in outer._modules.items():
        if child is inner:
            return str(name)
    # Not a child: in a list that is no ModuleList, or further down.
    return next((name for name, child in outer.named_modules() if child is inner), type(inner).__name__)
