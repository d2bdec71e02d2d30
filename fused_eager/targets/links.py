"""Links between ranks: what a message and a byte cost (alpha and beta), and what a collective takes by that.

The formulas are those of rings, and of binomial trees for what goes from or to one rank. They know neither the topology
of a pod nor that other jobs use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MESSAGE_BYTES = 4  # what is sent where nothing is: a barrier


class LinkError(ValueError):
    """A text that names no link."""


@dataclass(frozen=True)
class Link:
    """What ranks are connected by.

    Arguments:
        alpha: seconds that a message takes, whatever it holds.
        bandwidth: bytes per second that a rank sends, while it receives as many.
        source: where both numbers are from.
    """

    name: str
    alpha: float
    bandwidth: float
    source: str

    @staticmethod
    def parse(text: str) -> Link:
        """A link by its name in `LINKS`, or by its numbers: `10,12.5` is 10 us for a message and 12.5 GB/s.

        Raises:
            LinkError: the text is neither.
        """
        if text in LINKS:
            return LINKS[text]
        try:
            alpha, bandwidth = (float(part) for part in text.split(","))
        except ValueError:
            known = ", ".join(("gloo", *LINKS))
            raise LinkError(f"no link {text!r}; known are {known}, or give us and GB/s, as in 10,12.5") from None
        if not (alpha >= 0 and bandwidth > 0 and math.isfinite(alpha + bandwidth)):
            raise LinkError(f"no link {text!r}: a message takes 0 us or more, and the bandwidth is above 0 GB/s")
        return Link(text, alpha * 1e-6, bandwidth * 1e9, "given")

    def seconds(self, op: str, nbytes: int, ranks: int) -> float:
        """What a collective takes.

        Arguments:
            op: as the event log names it, one of `ranks.table.COLLECTIVES`.
            nbytes: of all tensors that a rank gives and gets, as in the event log.
            ranks: of its group.
        """
        if ranks < 2:
            return 0.0
        kind = op.strip("_").removesuffix("_coalesced")
        rounds, others = math.ceil(math.log2(ranks)), ranks - 1
        whole = payload(kind, nbytes, ranks)
        if kind == "allreduce":
            return self._ring(2 * others, 2 * others / ranks * whole)
        if kind in _RINGS:
            return self._ring(others, others / ranks * whole)
        if kind in ("broadcast", "reduce"):
            return self._ring(rounds, whole)
        if kind in ("barrier", "monitored_barrier"):
            return self._ring(2 * rounds, 2 * rounds * MESSAGE_BYTES)
        return self._ring(1, whole)  # from one rank to another

    def _ring(self, messages: float, nbytes: float) -> float:
        return messages * self.alpha + nbytes / self.bandwidth


_RINGS = frozenset({
    "allgather", "allgather_base", "allgather_into_tensor", "reduce_scatter", "reduce_scatter_base",
    "reduce_scatter_tensor", "alltoall", "alltoall_base", "gather", "scatter",
})  # fmt: skip


def payload(kind: str, nbytes: int, ranks: int) -> float:
    """The bytes of the whole value of a collective, which all ranks have together or each has once, out of those of all
    tensors that a rank gives and gets."""
    if kind.startswith(("allgather", "reduce_scatter")):
        return nbytes * ranks / (ranks + 1)  # the whole, and this rank's part
    if kind.startswith("alltoall"):
        return nbytes / 2
    if kind in ("gather", "scatter"):  # the root has the whole as well: others tell of their part alone
        return nbytes * ranks
    return float(nbytes)


# One axis of a torus, both ways round at once; see docs/targets.md.
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("ici-v4", 1e-6, 90e9, "public figures: 45 GB/s each way on a link, two links of an axis"),
        Link("ici-v5e", 1e-6, 90e9, "public figures: 45 GB/s each way on a link, two links of an axis"),
        Link("ici-v5p", 1e-6, 180e9, "public figures: 90 GB/s each way on a link, two links of an axis"),
        Link("ici-v6e", 1e-6, 180e9, "public figures: 90 GB/s each way on a link, two links of an axis"),
        Link("dcn", 20e-6, 3.125e9, "public figures: 100 Gbit/s of a host, which four chips share"),
    )
}
