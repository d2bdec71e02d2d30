"""Who runs the ops of one thread: XLA, in regions of what was recorded, or ATen at once.

A thread is in one of three states. These are all the ways between them:

               .--------------------------------  a context is entered  ---------------------------------.
               |  nothing has been saved up yet            |        segments that begin there are known   |
               v                                           v                 to be faster natively        v
         [ RESTING ]  -- a sync point, and the ---->  [  FUSED  ]  -- a segment begins that is ---->  [ NATIVE ]
          ATen runs      rest is over                 ops are         faster natively, or is to        ATen runs
          ops; none                                   recorded,       be timed that way: `choice`      ops, and
          is written   <- the stream is new, and --   and regions                                      segments
          down           writing it down has used     run; a new      <--- a segment begins that --    are timed
               ^         up its share: `rest`         stream is run        is faster fused, or is           |
               |       <- shapes change in each of    by ATen as it        to be timed that way:            |
               |         several streams in a row     is written           `choice`                         |
               |       <- a length comes that is      down                                                  |
               |         new: to the next sync point                                                        |
               |       <- what is being compiled has                                                        |
               |         come several times                                                                 |
               '------  a value is read while something is compiled, so that no time counts  ---------------'

In `RESTING` and in `NATIVE` our mode need not be on torch's stack: `frontends.context.bypass` takes it off at a turn,
and brings it back when `Policy` says so. How long torch ran alone, and why, the event `bypass` tells.

What decides is measured, and kept as values: what segments took (`segment`, `times`, `compare`), and turns of a loop
(`iteration`, `alone`); how often shapes changed (`hotness`); what has been saved up for writing ops down (`allowance`).
What was measured belongs to the process and not to a thread; `executing.choices` keeps it in the compile cache. Within
a region that is fused, who runs a single op is measured by itself (`executing.op_autotuner`: event `op-choice`).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .allowance import ALLOWANCE
from .alone import Alone, Turn
from .autotuner import Autotuner
from .hotness import Backoff
from .segment import LOSS, Pieces, Segment
from .times import Place

LEAST = 4  # sync points that a rest has to last to be worth taking our mode off torch's stack
SLOWER = 0.5  # of the time in which rounds are written down and timed is lost


class State(enum.Enum):
    """Who runs ops."""

    RESTING = "resting"  # ATen, and nothing is recorded until something has happened
    NATIVE = "native"  # ATen, as it is faster, or is to be timed
    FUSED = "fused"  # XLA, from what is recorded


@dataclass(slots=True)
class Policy:
    """The choice for the ops of one thread. Its methods are what happens in the program, each told by the door through
    which the ops come; its properties say what follows from that."""

    autotuner: Autotuner = field(default_factory=Autotuner)
    backoff: Backoff = field(default_factory=Backoff)
    alone: Alone = field(default_factory=Alone)

    # ---- what is so ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Who runs ops now, where it is measured."""
        if self.backoff.left:
            return State.RESTING
        return State.NATIVE if self.autotuner.native else State.FUSED

    @property
    def reason(self) -> str:
        """Why ATen runs ops now, if it does: a code."""
        return self.backoff.code if self.backoff.left else "region.native"

    def runs_natively(self, measures: bool) -> bool:
        """Whether the op that has come is ATen's; a rest whose time is over ends. Without `measures`, only rests
        count."""
        return self.backoff.is_on() or (self.autotuner.native and measures)

    @property
    def rests_long(self) -> bool:
        """Whether it is worth taking our mode off torch's stack for this rest."""
        return self.backoff.until is not None or self.backoff.left >= LEAST

    @property
    def may_bypass(self) -> bool:
        """Whether what follows the value that was read just now may be ATen's alone."""
        return self.rests_long or self.autotuner.suits_torch_alone

    @property
    def bypasses_rounds(self) -> bool:
        """Whether what the program does between two of its lines is ATen's alone: it rests, or its rounds are natively
        faster."""
        counted = self.autotuner.countdown > 0 and self.autotuner.native_until() > time.perf_counter()
        return self.rests_long or counted

    # ---- a context -----------------------------------------------------------------------------------------------

    def enter(self, place: Place, carried: float) -> float:
        """A context is entered at `place`. Returns until when torch is to be alone in it, as far as is known of those
        before, the last of which has `carried` that over."""
        return max(self.autotuner.enter(place), carried)

    def enter_again(self) -> None:
        """The context comes again for which this was kept: how its streams fared is still true, where it was in a
        segment is not."""
        self.autotuner = Autotuner()

    def leave(self, bypassed: bool) -> None:
        """A context is left; in one that was `bypassed` to its end without a turn, this is a sync point."""
        if bypassed and self.alone.turns.kind == "entry":
            self.backoff.pass_sync()
        self.autotuner.leave(bypassed)

    # ---- segments and streams ------------------------------------------------------------------------------------

    def begin(self, place: Place, op: Hashable, shapes: Sequence[Sequence[int] | None]) -> bool:
        """The first op of a segment has come. Returns whether the way in which ops run has changed."""
        changes = self.autotuner.begin(place, op, shapes)
        self.alone.pass_on(self.state is not State.FUSED, self.reason)
        return changes

    def count_round(self, ops: int) -> None:
        """What has begun is one of the rounds of a loop that nothing else tells apart, of so many ops: natively, they
        are counted."""
        self.autotuner.countdown = ops if self.autotuner.native else 0

    def pass_sync(self) -> None:
        """A sync point: where a thread that rests may go on recording."""
        if self.backoff.left:
            self.autotuner.restart()
            self.backoff.pass_sync()

    def pass_boundary(self, place: Place, waited: bool, stepped: bool, idle: bool, compiling: bool) -> bool:
        """The program has read a value at `place`, or waited there (see `Autotuner.passed`): the way in which it goes
        on may be another one. Returns whether that says nothing as something is `compiling`, so that the thread had
        better rest."""
        disturbed = False
        if self.backoff.left or compiling:
            self.autotuner.restart()
            disturbed = not self.backoff.left and self.autotuner.is_sampling
        self.autotuner.passed(place, waited, stepped, idle)
        segment = self.autotuner.running
        if segment is not None and segment.chosen is False and not segment.paid:
            segment.paid = True
            ALLOWANCE.paid()
        return disturbed

    @property
    def owing(self) -> Segment | None:
        """The segment that ran last, if the compile cache is to be told of it, or asked."""
        segment = self.autotuner.running
        return segment if segment is not None and segment.owed else None

    def flushed(self, pieces: Pieces | None, stable: bool, shapes: Hashable) -> None:
        """A flush has run these regions, of a stream that is compiled (`stable`), or has come with new `shapes`."""
        self.autotuner.flushed(pieces)
        self.backoff.saw(stable, shapes)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def end_turn(self, turn: Turn) -> float:
        """A turn has ended, with our mode on torch's stack. Returns until when torch is to be alone, as far as is
        known; 0 if it is not."""
        until = self.autotuner.rest(turn)
        return (self.autotuner.turned() or until) if turn == "step" else until

    def bypass(self, turn: Turn, until: float) -> None:
        """Our mode leaves torch's stack, until then and for as long as the thread rests."""
        self.alone.bypass(turn, until, self.reason)

    def end_turn_bypassed(self, turn: Turn, turns: int, now: float) -> bool:
        """A turn has ended of which torch has run all, or so many. Returns whether our mode is to come back: the time
        is over for which it was to be away, or turns of this kind take another time."""
        alone, same = self.alone, True
        if alone.turns.kind == "entry":
            alone.turns.kind = turn
        if turn == alone.turns.kind:
            same = alone.turns.ended(now, turns)
            alone.tell_now_and_then(now)
            self.backoff.pass_sync(turns)
        if not same:
            self.autotuner.iteration.forget()  # it is another program now
        return not same or (now >= alone.until and not self.backoff.left)

    def bypass_rounds(self, came: float) -> float:
        """Rounds are to be torch's alone, after what began when one `came`. Returns until when."""
        if self.rests_long:
            return 0.0
        # Writing down and compiling is part of what it took to try the other way.
        now = time.perf_counter()
        return max(self.autotuner.native_until(), now + SLOWER * (now - came) / LOSS)

    def resume(self, overlooked: int) -> None:
        """Our mode is back on torch's stack, after so many turns more."""
        alone = self.alone
        alone.turns.count += overlooked
        alone.pass_on(False)
        self.autotuner.resume(alone.turns.usual, alone.turns.middle)
