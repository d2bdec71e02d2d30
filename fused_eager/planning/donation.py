"""Donation: which dying input of a region gives its memory to which output.

JAX pairs what is donated with the outputs by dtype and shape alone, in order; XLA then copies the input wherever it is
still read after the output has begun to be written. An optimizer's parameters and moments, all of one shape, would be
paired across: two copies of each (SGD with momentum, 47 MB of parameters: 53 ms instead of 17). So the pairs are made
here, and handed over by order: the k-th donated input makes room for the k-th output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from fused_eager.fusion_rules.rule import OpClass, rule_for

from ..memory.borrow import Home
from ..tracing.stream import Node
from .order import operands

# Ops that read an element of their operand no later than they write the same one of their result.
_IN_PLACE = (OpClass.POINTWISE, OpClass.NORMALIZATION, OpClass.SCATTER, OpClass.OPTIMIZER)


def pairs(
    nodes: Sequence[Node],
    members: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    free: Collection[int],
    homes: Mapping[int, Home],
) -> dict[int, int]:
    """Which input gives its memory to which output, in the order of the inputs.

    What the program wrote in place is paired with what it wrote over; any other input with an output that nothing
    reads it after.

    Args:
        nodes: the stream.
        members: the nodes of the region in the order in which they may run.
        inputs, outputs: of the region.
        free: the inputs whose memory may be reused.
        homes: dtype and shape of every value.
    """
    if not free:
        return {}
    flow = _Flow(nodes, members)
    heirs = {flow.origin(o): o for o in reversed(outputs)}
    found: dict[int, int] = {}
    left = dict.fromkeys(outputs)

    def give(v: int, candidates: Iterable[int]) -> None:
        o = next((o for o in candidates if homes[v] == homes[o] and flow.fits(v, o)), None)
        if o is not None:
            found[v] = o
            del left[o]

    dying = [v for v in inputs if v in free]
    for v in dying:
        give(v, [heirs[v]] if v in heirs else [])
    for v in dying:
        if v not in found:
            give(v, left)
    return {v: found[v] for v in dying if v in found}


class _Flow:
    """Who reads what before whom in a region; sets of nodes are the bits of a number."""

    def __init__(self, nodes: Sequence[Node], members: Sequence[int]):
        self._nodes = nodes
        self._maker: dict[int, int] = {}
        self._before: dict[int, int] = {}  # what has to have run before the maker of a value, and the maker
        self._readers: dict[int, int] = {}
        self._over: dict[int, int] = {}  # what a value has been written over
        again: dict[int, int] = {}  # XLA reads the one value of such an op again rather than its result
        for p, i in enumerate(members):
            node, before = nodes[i], 1 << p
            read = dict.fromkeys(operands(node))
            for operand in read:
                before |= self._before.get(operand, 0)
                v: int | None = operand
                while v is not None:
                    self._readers[v] = self._readers.get(v, 0) | 1 << p
                    v = again.get(v)
            for result, over in zip(node.results, _overwritten(node), strict=True):
                self._maker[result.vid], self._before[result.vid] = i, before
                if over is not None:
                    self._over[result.vid] = over
                if len(read) == 1 and _class(node) is OpClass.POINTWISE:
                    (again[result.vid],) = read

    def origin(self, v: int) -> int:
        """The input that a value has been written over, step by step; the value itself where there is none."""
        while v in self._over:
            v = self._over[v]
        return v

    def fits(self, v: int, o: int) -> bool:
        """Whether nothing reads input `v` once output `o` is being written but, element by element, its own op."""
        maker = self._nodes[self._maker[o]]
        if self._readers.get(v, 0) & ~self._before[o]:
            return False
        return self.origin(o) == v or v not in operands(maker) or _is_in_place(maker, v, o)


def _overwritten(node: Node) -> list[int | None]:
    """For each result of a node, the value that the program wrote it over."""
    fresh = len(node.results) - len(node.targets)
    whole = [None] * fresh + [node.uses[t].vid for t in node.targets]
    return [v if r.base is None else r.base for r, v in zip(node.results, whole, strict=True)]


def _is_in_place(node: Node, v: int, o: int) -> bool:
    where = next(r.geometry for r in node.results if r.vid == o)
    return _class(node) in _IN_PLACE and all(u.geometry == where for u in node.uses if u.vid == v)


def _class(node: Node) -> OpClass | None:
    rule = rule_for(node.twin)
    return None if rule is None else rule.cls
