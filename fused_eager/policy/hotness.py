"""Hotness: when is a stream worth compiling?

A loop whose shapes keep changing (a growing KV cache, ragged batches) would compile for ever. Streams that run the
same ops on other shapes are variants of one *skeleton*. The first few variants are compiled as any stream is (with
compile="auto" in the background, once they come again). From then on the skeleton is unstable: a further variant is
compiled only when it has come back often enough to pay for it, and until
then its nodes run through ATen. It pays, as with renting or buying skis, once running it natively has taken as long as
compiling a variant did: so it never costs more than twice what knowing the future would. A thread that sees nothing but
such streams backs off and stops recording: its ops run natively at once, as in eager, and one stream is recorded now
and then to see whether things have settled.

On a device the program waits for the compiler at the first sight of a stream, and a program that generates text spends
its time on streams that never come again: other lengths, and other ops where it chooses in another way. So a stream has
to come twice there, if those that are like it have not come again: those of its skeleton, if its second shape comes
before the first has come again; or those that begin on its line, once two have been compiled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from ..bounded import Bounded
from ..log.events import LOG

VARIANTS = 4  # shapes of one skeleton that are compiled like any stream
HOLDS = True  # whether, on a device, streams have to come twice if those that are like them have not come again
BEGUN = 2  # streams that begin on one line, and are compiled at first sight though none of them has come again
SINGLES = 1  # shapes of it that may come once each without being suspicious
SIGHTINGS = 3  # how often a further one has to come, at least, before it is compiled
PATIENCE = 3  # unstable streams in a row before a thread stops recording
BACKOFF, LONGEST = 16, 1024  # sync points that it then lets pass: doubled each time nothing has settled


@dataclass(slots=True, eq=False)
class Compiled:
    """Streams that are alike, and compiled."""

    recurs: bool = False  # one of them has come again


@dataclass(slots=True, eq=False)
class Variants(Compiled):
    """Those of one skeleton."""

    signatures: set[Hashable] = field(default_factory=set)
    shapes: set[Hashable] = field(default_factory=set)  # the part of them without how the stream ends
    grows: bool = False  # no shape had come again when the second one came


@dataclass(slots=True, eq=False)
class Line(Compiled):
    """Those that begin on one line of the program."""

    count: int = 0


@dataclass
class Skeletons:
    """What has been seen of each skeleton (a tuple of op numbers)."""

    variants: Bounded[Hashable, Variants] = field(default_factory=lambda: Bounded(4096))
    lines: Bounded[Hashable, Line] = field(default_factory=lambda: Bounded(4096))
    held: Bounded[Hashable, str] = field(default_factory=lambda: Bounded(4096))  # shapes that have to come again: why
    sightings: Bounded[Hashable, int] = field(default_factory=lambda: Bounded(4096))
    cost: Bounded[Hashable, float] = field(default_factory=lambda: Bounded(4096))  # seconds to compile one variant
    spent: Bounded[Hashable, float] = field(default_factory=lambda: Bounded(4096))  # seconds of its shapes on ATen
    singles: Bounded[Hashable, int] = field(default_factory=lambda: Bounded(4096))  # shapes in a row that came once

    def came_once(self, skeleton: Hashable) -> bool:
        """Other shapes than ever before have come. Returns whether that is all that happens to this skeleton."""
        self.singles[skeleton] = self.singles.get(skeleton, 0) + 1
        return self.singles[skeleton] > SINGLES

    def is_unstable(
        self,
        skeleton: Hashable,
        signature: Hashable,
        shapes: Hashable,
        reproducible: bool,
        compiles: bool,
        line: Hashable = None,
    ) -> bool:
        """Whether ATen had better run a stream that has no executable yet, as its shapes keep changing: it would be
        compiled at once (`compiles`), or once it has come again. `line` is as in `is_hot`."""
        if reproducible:
            return not self.is_among_the_first(skeleton, signature)
        return not self.is_hot(skeleton, signature, shapes, line) if compiles else self.came_once(skeleton)

    def is_hot(
        self, skeleton: Hashable, signature: Hashable, shapes: Hashable = None, line: Hashable = None
    ) -> bool:
        """Whether to compile a stream that has no executable yet. Counts the sighting.

        Arguments:
            skeleton: its ops.
            signature: all that it is compiled for.
            shapes: the part of the signature that says how long ATen takes for it.
            line: the line that it begins on, if it may have to come twice.
        """
        self.singles.pop(skeleton, None)
        seen = self.of(skeleton)
        if signature in seen.signatures:  # the same computation from another line of the program
            return True
        if len(seen.signatures) < VARIANTS:
            if HOLDS and line is not None and self._holds(seen, self.on(line), shapes):
                return False
            seen.signatures.add(signature)
            seen.shapes.add(shapes)
            return True
        self.sightings[signature] = self.sightings.get(signature, 0) + 1
        if self.sightings[signature] < SIGHTINGS or self.spent.get(shapes, 0.0) < self.cost.get(skeleton, 0.0):
            return False
        del self.sightings[signature]
        self.spent.pop(shapes, None)
        return True

    def is_among_the_first(self, skeleton: Hashable, signature: Hashable) -> bool:
        """The same where no time may decide, and a stream is run as it was before: the first variants alone."""
        seen = self.of(skeleton).signatures
        if len(seen) < VARIANTS:
            seen.add(signature)
        return signature in seen

    def of(self, skeleton: Hashable) -> Variants:
        """What is known of its shapes."""
        found = self.variants.get(skeleton)
        if found is None:
            found = self.variants[skeleton] = Variants()
        return found

    def on(self, line: Hashable) -> Line:
        """What is known of the streams that begin there."""
        found = self.lines.get(line)
        if found is None:
            found = self.lines[line] = Line()
        return found

    def _holds(self, seen: Variants, begun: Line, shapes: Hashable) -> bool:
        """Whether shapes that are not compiled wait until they come again. Counts them."""
        if shapes in seen.shapes:  # they end in another way: a loop's second round
            seen.recurs = begun.recurs = True
        else:
            if len(seen.signatures) == 1 and not seen.recurs:
                seen.grows = True
            alone = begun.count >= BEGUN and not begun.recurs
            if (seen.grows or alone) and not self.held.pop(shapes, ""):
                self.held[shapes] = "region.unstable" if seen.grows else "region.new"
                return True
        begun.count += 1
        return False

    def compiled(self, skeleton: Hashable, seconds: float) -> None:
        """A variant took so long to compile, or to load."""
        self.cost[skeleton] = max(seconds, self.cost.get(skeleton, 0.0))

    def ran(self, shapes: Hashable, seconds: float) -> None:
        """A variant took so long on ATen."""
        self.spent[shapes] = self.spent.get(shapes, 0.0) + seconds


SKELETONS = Skeletons()


@dataclass(slots=True)
class Backoff:
    """How one thread's recent streams fared, and for how many sync points it still runs ops natively."""

    unstable: int = 0
    left: int = 0
    length: int = BACKOFF
    passed: int = 0  # sync points since the last stream that was recorded
    last: Hashable = None
    weight: int = 1  # how many streams the last one stands for: where it has settled, those of the backoff as well
    until: Callable[[], bool] | None = None  # what ends this backoff, instead of a number of sync points
    due: float = math.inf  # and when it ends where no sync points come, on the clock of `time.monotonic`

    @property
    def code(self) -> str:
        """Why ops run natively now."""
        return "region.unstable" if self.until is None else "region.new"

    def is_on(self) -> bool:
        """Whether ops run natively now."""
        if self.left and self.due < time.monotonic():
            self.due = math.inf
            self.wake()
        return self.left > 0

    def rest(self, until: Callable[[], bool], at_most: float = math.inf) -> None:
        """Begin a backoff that lasts until something has happened, and then to the next sync point; or for so many
        seconds, if no sync point has come by then. Not where somebody counts what is recorded."""
        if LOG.budgets:
            return
        self.until, self.left, self.passed = until, 1, 0
        self.due = time.monotonic() + at_most

    def rest_until_sync(self) -> None:
        """Begin a backoff that lasts to the next sync point, unless one is under way."""
        if not self.left:
            self.rest(lambda: True)

    def end(self) -> None:
        """Whatever backoff is under way is over."""
        self.until, self.left = None, 0

    def wake(self) -> None:
        """It has happened. From another thread: where no sync points come, nothing else would end the backoff."""
        if self.until is not None and not self.passed:
            self.end()

    @property
    def is_impatient(self) -> bool:
        """Whether one more unstable stream begins a backoff."""
        return self.unstable >= PATIENCE - 1

    def saw(self, hot: bool, signature: Hashable = None) -> None:
        """A stream was run: compiled (hot), or node by node because its shapes are new."""
        self.weight = 1 + self.passed if signature is not None and signature == self.last else 1
        self.last, self.passed = signature, 0
        if hot:
            self.unstable, self.length = 0, BACKOFF
            return
        self.unstable += 1
        if self.unstable >= PATIENCE and not LOG.budgets:
            # One stream short of the limit: the next one recorded decides whether to go on like this.
            self.unstable, self.left = PATIENCE - 1, self.length
            self.length = min(2 * self.length, LONGEST)

    def pass_sync(self, points: int = 1) -> None:
        """Count down at a sync point, or at so many since the last one."""
        if not self.left:
            return
        self.passed += points
        if self.until is None:
            self.left = max(self.left - points, 0)
        elif self.until():
            self.until, self.left = None, 0
