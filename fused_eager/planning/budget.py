"""Budget: what would take longer to compile than it can save is not compiled, where the program waits for the compiler.

A loop over the elements of a tensor, a numerical derivative, a table filled cell by cell: thousands of small ops, each
of another form (another place in the tensor, another shape), all from one line. Each form is machine code of its own,
which takes XLA a hundredth of a second, and saves some of the millionths of a second that ATen takes for it. A line has
its first forms compiled as any other. Ops of further ones are counted, and what compiling them costs is weighed against
what ATen takes for the stream, as often as it has come, or may be hoped to come.

Everything here is counted or looked up and nothing measured: what is compiled does not hang on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ..bounded import Bounded
from ..tracing.stream import Node, views

FORMS = 64  # of one op on one line that are compiled like any other
HOPED = 100  # times that any stream may be hoped to come
LONG = 512  # different forms in one stream, which take seconds to compile: it has to come again first
COMPILING = 0.01  # seconds for one op, roughly
CALLING = 5e-6  # seconds that ATen takes for a small op
SPEED = 4e9  # bytes that it reads and writes in a second

Forms = MutableMapping[Hashable, set[Hashable]]


def form(node: Node) -> Hashable:
    """What is equal for nodes of which XLA makes equal code."""
    return node.signature[0], views(node)  # type: ignore[index]


def surplus(nodes: Sequence[Node], forms: Forms) -> int:
    """How many ops of a stream have a form beyond the first ones of their line. Adds theirs to `forms`."""
    found = 0
    for node in nodes:
        line = (node.op, node.place and node.place[:2])
        seen = forms.get(line)
        if seen is None:
            seen = forms[line] = set()
        own = form(node)
        if own in seen:
            continue
        if len(seen) < FORMS:
            seen.add(own)
        else:
            found += 1
    return found


def seconds(nodes: Sequence[Node]) -> float:
    """How long ATen takes for a stream, at least: a product takes longer than reading and writing what it does."""
    seen = [use.geometry for node in nodes for use in node.uses]
    seen += [result.geometry for node in nodes for result in node.results]
    return len(nodes) * CALLING + sum(prod(g.size) * g.dtype.itemsize for g in seen) / SPEED


def pays(nodes: Sequence[Node], surplus: int, times: int = 0) -> bool:
    """Whether to compile a stream with so many ops of surplus forms that has come so many times."""
    return not surplus or surplus * COMPILING <= seconds(nodes) * max(times, HOPED)


def pays_alone(nodes: Sequence[Node]) -> bool:
    """The same of a stream of which nothing is known but what is in it: a run's answer is the next one's."""
    return pays(nodes, surplus(nodes, {}))


@dataclass
class Lines:
    """What a program's lines have had compiled, and how often what was not has come."""

    forms: Forms = field(default_factory=lambda: Bounded(4096))
    sightings: Bounded[Hashable, int] = field(default_factory=lambda: Bounded(4096))

    def pays(self, nodes: Sequence[Node], shapes: Hashable) -> bool:
        """Whether to compile a stream that has no executables yet. Counts the sighting; `shapes` stand for it."""
        beyond = surplus(nodes, self.forms)
        times = self.sightings.get(shapes, 0) + 1
        if times == 1 and len(nodes) >= LONG:
            different = len(set(map(form, nodes)))
            beyond = max(beyond, different if different >= LONG else 0)
        if not beyond:
            return True
        if pays(nodes, beyond, times):
            self.sightings.pop(shapes, None)
            return True
        self.sightings[shapes] = times
        return False


LINES = Lines()
