"""Donation: which dying input of a region gives its memory to which output.

JAX pairs what is donated with the outputs by dtype and shape alone, in order; XLA then copies the input wherever it is
still read after the output has begun to be written. An optimizer's parameters and moments, all of one shape, would be
paired across: two copies of each (SGD with momentum, 47 MB of parameters: 53 ms instead of 17). So the pairs are made
here, and handed over by order: the k-th donated input makes room for the k-th output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fused_eager.fusion_rules.rule import OpClass, rule_for

from ..devices.home import Home
from ..tracing.stream import Node
from .order import operands

# Ops that read an element of their operand no later than they write the same one of their result.
_IN_PLACE = (OpClass.POINTWISE, OpClass.NORMALIZATION, OpClass.SCATTER, OpClass.OPTIMIZER)


_NO_HEIRS: Mapping[int, int | None] = {}


def pairs(
    nodes: Sequence[Node],
    members: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    free: Collection[int],
    homes: Mapping[int, Home],
    only: Mapping[int, int | None] = _NO_HEIRS,
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
        only: inputs that may give their memory to one output alone, or to none.
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

    dying = [v for v in inputs if v in free and only.get(v, v) is not None]
    for v in dying:
        give(v, [heirs[v]] if v in heirs and only.get(v, heirs[v]) == heirs[v] else [])
    for v in dying:
        if v not in found and v not in only:
            give(v, left)
    return {v: found[v] for v in dying if v in found}


def guards(
    nodes: Sequence[Node], members: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], donated: Sequence[int]
) -> Iterator[tuple[int, int, frozenset[int]]]:
    """The outputs of a region that are written over an input whose memory they get: position of the output, of the
    input, and the nodes that the output depends on. If one of these is refused, the output is the input as it was.
    """
    flow = None
    for k, p in enumerate(donated):
        flow = flow or _Flow(nodes, members)
        o = outputs[k]
        if flow.origin(o) == inputs[p]:
            yield k, p, flow.before(o)


def heirs_to_keep(
    nodes: Sequence[Node],
    members: Sequence[int],
    outputs: Collection[int],
    kept: Mapping[int, int],
    checking: Collection[int],
) -> dict[int, int | None]:
    """For each input that holds what a tensor goes back to if a check fails: the only output of this region that may
    have its memory, or None.

    That is the tensor's last value, where the region makes it. It can go back even so: what depends on a check of the
    same region is written only where that has passed (`guards`), and checks of earlier regions are looked at before.

    Args:
        members: the nodes of the region.
        kept: input -> the last value that the program has written over it.
        checking: the nodes of the stream that may ask for checks.
    """
    flow = _Flow(nodes, members)
    inside = frozenset(members) & frozenset(checking)

    def may(v: int, o: int) -> bool:
        if o not in outputs or flow.origin(o) != v:
            return False
        return not inside & flow.before(o) or _class(nodes[flow.maker(o)]) in _CHEAPLY_GUARDED

    return {v: o if may(v, o) else None for v, o in kept.items()}


# They read what they write over anyway.
_CHEAPLY_GUARDED = (OpClass.POINTWISE, OpClass.OPTIMIZER)


def last_written(nodes: Sequence[Node], live: Collection[int], inputs: Collection[int]) -> dict[int, int]:
    """Of some inputs, those that the program has written over and still sees: input -> its last value."""
    flow = _Flow(nodes, range(len(nodes)))
    found = {flow.origin(o): o for o in live}
    return {v: found[v] for v in inputs if v in found and found[v] != v}


class _Flow:
    """Who reads what before whom in a region; sets of nodes are the bits of a number."""

    def __init__(self, nodes: Sequence[Node], members: Sequence[int]):
        self._nodes, self._members = nodes, members
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

    def maker(self, o: int) -> int:
        """The node that makes a value."""
        return self._maker[o]

    def before(self, o: int) -> frozenset[int]:
        """The nodes that a value depends on, and the one that makes it."""
        bits = self._before[o]
        return frozenset(i for p, i in enumerate(self._members) if bits >> p & 1)

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
