"""Rounds: where a stream that is about to be full is cut, so that a loop that never stops for anything is cut alike.

A stream may hold so many ops. Cut there, a loop whose rounds are of another length is cut at another op each time, and
each of those streams has to be compiled. So past one half of the limit the stream ends before the op that it began
with, if that comes again with values that the stream has not made, as at the beginning of a round; past three quarters,
if it comes again at all, as in a loop that goes on with what it has made.

Where the program neither reads a value nor steps an optimizer, that is the one thing that comes round in it (`Rounds`).
A thread that takes up recording in the middle of such a loop would begin at another op each time, and nothing that it
writes down would come again: so it lets ops pass until a round begins. And a round is what is timed there, to find out
whether fused is faster.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from fused_eager.fusion_rules.lowering import leaves

from ..devices.storage import has_memory, storage_of
from ..log import site
from ..tracing.opinfo import OpInfo
from ..tracing.stream import Stream

ENOUGH = 2  # streams in a row that were cut so, until what is between two cuts is timed


def comes_again(stream: Stream, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a stream that is at least half full is to end before this op."""
    first, limit = stream.nodes[0], stream.config.max_pending
    if first.op is not info.op or first.place != site.here():
        return False
    if len(stream.nodes) >= limit * 3 // 4:
        return True
    return not any(_is_pending(value, stream) for value in leaves([args, kwargs]))


def _is_pending(value: Any, stream: Stream) -> bool:
    if not _has_storage(value):
        return False
    found = stream.device.table.get(storage_of(value)._cdata)
    return found is not None and found.stream is not None


@dataclass(slots=True)
class Rounds:
    """The rounds of a thread's loop that nothing else tells apart.

    A round begins with an op that takes nothing that was made in it: the inputs of the loop. Which of those it is once
    a round has passed is remembered, and waited for the next time. Where none comes, as in a loop that goes on with
    what it has made, it is whichever op comes then.
    """

    op: object = None  # what a round begins with,
    place: Hashable = None  # and its line; None: it is not known
    ops: int = 0  # of the last stream that was cut so
    aligns: bool = False  # ops are let pass until a round begins
    _cuts: int = 0  # streams in a row that were cut where a round begins
    _passed: int = 0  # ops that have run natively since,
    _met: bool = False  # that one among them, with something that was made since,
    _made: set[int] = field(default_factory=set)  # and the storages of what they made, or others in their place

    def align(self) -> None:
        """Let ops pass from here on, until a round begins."""
        self.aligns, self._passed, self._met = True, 0, False
        self._made.clear()

    def over(self) -> None:
        """The program reads a value, or an optimizer has stepped: these tell its rounds apart."""
        self.aligns, self._cuts = False, 0
        self._made.clear()

    def cut(self, info: OpInfo, ops: int) -> bool:
        """A stream of so many ops was cut before this one. Whether that is what comes round in the program."""
        self.op, self.place, self.ops = info.op, site.here(), ops
        self._cuts += 1
        return self._cuts >= ENOUGH

    def begins(self, info: OpInfo) -> bool:
        """Whether this op is what a round begins with."""
        return self.op is info.op and self.place == site.here()

    def lets_pass(self, limit: int, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this op is to run natively; else a round begins with it. `limit`: of ops that may be pending."""
        known = self.begins(info)
        if known or self.place is None or self._passed >= limit:
            first = self._takes_nothing_made(args, kwargs)
            # What was made before anybody looked may be of this round.
            told = self._met or self._passed >= limit // 2
            late = self._passed >= limit * 3 // 4
            if (first and told) or (late and (known or self.place is None)) or self._passed >= 2 * limit:
                self.op, self.place, self.aligns = info.op, site.here(), False
                return False
            self._met = self._met or (known and not first)
        self._passed += 1
        return True

    def has_passed(self, info: OpInfo, args: Any, out: Any) -> None:
        """An op has run natively, and returned `out`."""
        made = leaves([out, [args[i] for i in info.written if i < len(args)]])
        self._made.update(map(_storage, filter(_has_storage, made)))

    def _takes_nothing_made(self, args: Any, kwargs: dict[str, Any]) -> bool:
        found = list(filter(_has_storage, leaves([args, kwargs])))
        return bool(found) and self._made.isdisjoint(map(_storage, found))


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and has_memory(value)


def _storage(t: torch.Tensor) -> int:
    return storage_of(t)._cdata
