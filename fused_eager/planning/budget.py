"""Budget: what would take longer to compile than it can save is not compiled, where the program waits for the compiler.

A loop over the elements of a tensor, a numerical derivative, a table filled cell by cell: thousands of small ops, each
of another form (another place in the tensor, another shape), all from one line. Each form is machine code of its own,
which takes XLA a hundredth of a second or, by the kind of op, several (`costs`), and saves some of the millionths of a
second that ATen takes for it.

A line has its first forms compiled as any other. Once all lines of the program together have had many (a comparison of
two tensors is twenty ops on as many lines), a line that has had a few before has no more of them; a model whose layers
come all at once from a new line has. What compiling further ones costs is weighed against what ATen takes for the
stream, as often as it has come, or may be hoped to come.

Everything here is counted or looked up and nothing measured: what is compiled does not hang on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ..bounded import Bounded
from ..tracing.stream import Node, views
from .costs import seconds_of

FORMS = 64  # of one op on one line that are compiled like any other,
SPENT = 3.0  # if that takes no more than so many seconds,
FEW = 8  # and so many in streams before, once forms beyond that have taken
TOGETHER = 5.0  # seconds, on all lines of the program
REGION = 0.05  # seconds that any region takes to trace, to hand to the compiler and to load
HOPED = 100  # times that any stream may be hoped to come
LONG = 5.0  # seconds that the different forms of one stream take to compile: it has to come again first
CALLING = 5e-6  # seconds that ATen takes for a small op
SPEED = 4e9  # bytes that it reads and writes in a second

Forms = MutableMapping[Hashable, set[Hashable]]


def form(node: Node) -> Hashable:
    """What is equal for nodes of which XLA makes equal code."""
    return node.signature[0], views(node)  # type: ignore[index]


def compiling(nodes: Iterable[Node]) -> float:
    """How many seconds XLA takes for the different forms of these ops, roughly."""
    return sum({form(node): seconds_of(node.op) for node in nodes}.values())


def seconds(nodes: Sequence[Node]) -> float:
    """How long ATen takes for a stream, at least: a product takes longer than reading and writing what it does."""
    seen = [use.geometry for node in nodes for use in node.uses]
    seen += [result.geometry for node in nodes for result in node.results]
    return len(nodes) * CALLING + sum(prod(g.size) * g.dtype.itemsize for g in seen) / SPEED


def pays(nodes: Sequence[Node], surplus: float, times: int = 0) -> bool:
    """Whether to compile a stream whose surplus forms take so many seconds, and which has come so many times."""
    return surplus <= seconds(nodes) * max(times, HOPED)


def pays_alone(nodes: Sequence[Node]) -> bool:
    """The same of a stream of which nothing is known but what is in it: a run's answer is the next one's."""
    return pays(nodes, Lines().surplus(nodes))


@dataclass
class Lines:
    """What a program's lines have had compiled, and how often what was not has come."""

    forms: Forms = field(default_factory=lambda: Bounded(4096))
    sightings: Bounded[Hashable, int] = field(default_factory=lambda: Bounded(4096))
    further: float = 0.0  # seconds that forms beyond the first few of each line have taken, roughly

    def surplus(self, nodes: Sequence[Node]) -> float:
        """How many seconds compiling takes for the ops of a stream that have a form beyond the first ones of their
        line. Their forms are among the first ones from then on, as far as these go."""
        found, own_share = 0.0, REGION / max(len(nodes), 1)
        before: dict[Hashable, int] = {}  # forms that each line has had in other streams
        for node in nodes:
            line = (node.op, node.place and node.place[:2])
            seen = self.forms.get(line)
            if seen is None:
                seen = self.forms[line] = set()
            own = form(node)
            if own in seen:
                continue
            cost = seconds_of(node.op)
            had = before.setdefault(line, len(seen))
            many = self.further >= TOGETHER and had >= FEW
            if many or len(seen) >= min(FORMS, SPENT / cost):
                found += cost
                continue
            if len(seen) >= FEW:
                self.further += cost + own_share
            seen.add(own)
        return found

    def pays(self, nodes: Sequence[Node], shapes: Hashable) -> bool:
        """Whether to compile a stream that has no executables yet. Counts the sighting; `shapes` stand for it."""
        beyond = self.surplus(nodes)
        times = self.sightings.get(shapes, 0) + 1
        if times == 1 and sum(seconds_of(node.op) for node in nodes) >= LONG:
            different = compiling(nodes)
            beyond = max(beyond, different if different >= LONG else 0.0)
        if not beyond:
            return True
        if pays(nodes, beyond, times):
            self.sightings.pop(shapes, None)
            return True
        self.sightings[shapes] = times
        return False


LINES = Lines()
