"""Whether what a node reads and writes may share memory in one loop: where it does, parts are copied first.

A value is *behind* another of the region if that may be computed from it in one loop with it. A node of a list op
(`_foreach_mul_` over ten thousand parameters) has as many operands and results as the list; what is found out of all of
them is found once for each node, so that no question costs more for a longer list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fused_eager.fusion_rules.rule import OVERWRITERS, OpClass, rule_for

from ..tracing.stream import Node, Result, Use

Behind = dict[int, frozenset[int]]  # of each value of the region


def behind_results(node: Node, behind: Behind) -> frozenset[int]:
    """What is behind the results of a node that it makes anew."""
    read = {use.vid for use in node.uses}
    return frozenset(read).union(*_distinct(read, behind))


def reads_disjoint(node: Node, behind: Behind) -> bool:
    """Whether no operand of a node is computed from another, so that one can be written into the other."""
    if rule_for(node.twin) is None:
        return False  # a decomposition may write into what it reads
    read = {use.vid for use in node.uses}
    return len(read) == len(node.uses) and all(values.isdisjoint(read) for values in _distinct(read, behind))


class Writes:
    """What a node writes into, beside what it reads."""

    def __init__(self, node: Node, behind: Behind) -> None:
        found = rule_for(node.twin)
        self._pointwise = found is not None and found.cls is OpClass.POINTWISE
        targets = set(node.targets)
        skipped = targets if node.op._schema.name in OVERWRITERS else set()
        self._uses: dict[int, list[tuple[Use, bool]]] = defaultdict(list)
        for position, use in enumerate(node.uses):
            if position not in skipped:
                # Where a part moves, only what is written lies at the same place.
                self._uses[use.vid].append((use, use.start is None or position in targets))
        self._behind = _distinct(self._uses, behind)

    def are_disjoint(self, result: Result) -> bool:
        """Whether what is written into a value is not computed from it, or only from the same place."""
        for use, is_fixed in self._uses.get(result.base, ()):  # type: ignore[arg-type]  # a value, as it is written
            if not (self._pointwise and is_fixed and use.geometry == result.geometry):
                return False
        return all(result.base not in values for values in self._behind)


def _distinct(vids: Iterable[int], behind: Behind) -> list[frozenset[int]]:
    """What is behind some values, each set once: all results of a node have one in common."""
    return list({id(values): values for values in (behind.get(vid) for vid in vids) if values}.values())
