"""Fetching: where a stream runs whose shapes keep changing, on a device whose memory ATen cannot get at.

A growing cache, ragged batches, masks of varying length: the stream is not compiled as a whole, and op by op most ops
have another form each time too, a tenth of a second of compiling for each. The host's ATen needs no compiling, but the
values have to come and go. What is less is counted, not measured; for a small model it is the host, and for weights of
gigabytes the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import isqrt, prod

from ..bounded import Bounded
from ..devices.home import Home, nbytes_of
from ..tracing.stream import Node
from .budget import REGION, form, seconds
from .costs import seconds_of
from .plan import operands

ROUND_TRIP = 2e-5  # seconds that one value takes to come or to go, however small
PRODUCTS = 2e10  # multiplications in a second, on the host

# What may hold a product of matrices, by how the op's name ends.
_PRODUCTS = ("mm", "mv", "linear", "convolution", "attention", "lstm", "gru")

_singly: Bounded[Hashable, bool] = Bounded(1 << 14)  # forms that have been compiled alone


def is_cheaper(nodes: Sequence[Node], homes: Mapping[int, Home], live: frozenset[int], link: float) -> bool:
    """Whether a stream takes less time on fetched values than op by op. Where it does not, its ops are as if compiled
    from then on.

    Arguments:
        nodes: the stream.
        homes: dtype and shape of every value of it.
        live: values that some tensor sees after it.
        link: bytes that go between the host and the device in a second; infinite where they share their memory.
    """
    new = {f: seconds_of(node.op) + REGION for node in nodes if (f := form(node)) not in _singly}
    if on_host(nodes, homes, live, link) < sum(new.values()):
        return True
    for f in new:
        _singly[f] = True
    return False


def on_host(nodes: Sequence[Node], homes: Mapping[int, Home], live: frozenset[int], link: float) -> float:
    """How many seconds a stream takes on the host, roughly, with what its values take to come and to go."""
    made = {r.vid for node in nodes for r in node.results}
    moved = {v for node in nodes for v in operands(node) if v not in made} | (made & live)
    way = sum(nbytes_of(homes[v]) for v in moved) / link + (len(moved) * ROUND_TRIP if link != float("inf") else 0.0)
    return seconds(nodes) + sum(map(_multiplications, nodes)) / PRODUCTS + way


def _multiplications(node: Node) -> int:
    """Of the product that an op may hold: m times k, k times n and m times n numbers are (m k n) squared together."""
    name = node.op._schema.name.partition("::")[2].strip("_")
    if not name.removesuffix("_backward").endswith(_PRODUCTS):
        return 0
    seen = [use.geometry for use in node.uses] + [result.geometry for result in node.results]
    sizes = [prod(geometry.size) for geometry in seen]
    return isqrt(prod(sorted(sizes)[-3:]))
