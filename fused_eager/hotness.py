"""Hotness: when is a stream worth compiling?

A loop whose shapes keep changing (a growing KV cache, ragged batches) would compile for ever. Streams that run the
same ops on other shapes are variants of one *skeleton*. The first few variants are compiled at once. From then on the
skeleton is unstable: a further variant is compiled only when it has come back often enough to pay for it, and until
then its nodes run through ATen. A thread that sees nothing but such streams stops recording for a spell: its ops run
natively at once, as in eager, and one stream is recorded now and then to see whether things have settled.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from .bounded import Bounded

VARIANTS = 4  # shapes of one skeleton that are compiled at first sight
SIGHTINGS = 3  # how often a further one has to come before it is compiled
PATIENCE = 3  # unstable streams in a row before a thread stops recording
SPELL, LONGEST = 16, 1024  # sync points that it then lets pass: doubled each time nothing has settled


@dataclass
class Skeletons:
    """What has been seen of each skeleton (a tuple of op numbers)."""

    variants: Bounded[Hashable, set[Hashable]] = field(default_factory=lambda: Bounded(4096))
    sightings: Bounded[Hashable, int] = field(default_factory=lambda: Bounded(4096))

    def is_hot(self, skeleton: Hashable, signature: Hashable) -> bool:
        """Whether to compile a stream that has no executable yet. Counts the sighting."""
        seen = self.variants.get(skeleton)
        if seen is None:
            seen = self.variants[skeleton] = set()
        if signature in seen:  # the same computation from another line of the program
            return True
        if len(seen) < VARIANTS:
            seen.add(signature)
            return True
        self.sightings[signature] = self.sightings.get(signature, 0) + 1
        if self.sightings[signature] < SIGHTINGS:
            return False
        del self.sightings[signature]
        return True


SKELETONS = Skeletons()


@dataclass
class Spell:
    """How one thread's recent streams fared, and for how many sync points it still runs ops natively."""

    unstable: int = 0
    left: int = 0
    length: int = SPELL

    def saw(self, hot: bool) -> None:
        """A stream was run: compiled (hot), or node by node because its shapes are new."""
        if hot:
            self.unstable, self.length = 0, SPELL
            return
        self.unstable += 1
        if self.unstable >= PATIENCE:
            # One stream short of the limit: the next one recorded decides whether to go on like this.
            self.unstable, self.left = PATIENCE - 1, self.length
            self.length = min(2 * self.length, LONGEST)

    def passed_sync(self) -> None:
        """Count down at a sync point."""
        self.left = max(0, self.left - 1)
