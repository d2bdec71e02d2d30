"""Call sites: the line of the user's program that an op came from."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<frozen")
_is_internal: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a program. `file` is "?" where no Python frame of the user's is on the stack (an engine's thread)."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


UNKNOWN = Site("?", 0, "?")


def here() -> tuple[CodeType, int] | None:
    """The innermost frame outside torch and this library, as (code, line): cheap enough for every op."""
    frame: FrameType | None = sys._getframe(1)
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


def describe(place: tuple[CodeType, int] | None) -> Site:
    """The `Site` of what `here` returned."""
    return UNKNOWN if place is None else Site(place[0].co_filename, place[1], place[0].co_name)
