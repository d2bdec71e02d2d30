"""Repeats: the equal layers of a deep model, found in the stream, so that each is compiled once and not once per layer.

A stream is read as a string of op numbers, and its longest tandem repeat (the same letters again and again, at least
three times) is cut at its period; what lies before and after it is read in the same way. Where within the period to
cut decides what is lost: the fewest bytes that one layer hands to the next are best, which is the residual stream of a
transformer, or nothing at all between the parameters of an optimizer. Only what costs little is cut: layers that hold
products or convolutions, which XLA does not fuse across anyhow, or ops that are loops of their own (a write to a part
of a tensor, by an index), and work that is independent. A long chain of pointwise ops stays whole. (Apophenia finds
repeats in the task stream of Legion for the same end: Yadav et al. 2025.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fused_eager.fusion_rules.rule import OpClass, rule_for

from ..devices.home import Home, nbytes_of
from ..tracing.stream import Node, views
from .order import operands

LEAST = 128  # ops: what is shorter compiles fast enough as a whole
PART = 32  # ops of a region, at least: starting one costs about as much as recording four ops
TIMES = 3  # a layer has to come so often
_HEAVY = (OpClass.CONTRACTION, OpClass.CONVOLUTION)
_ALONE = (OpClass.GATHER, OpClass.SCATTER)


@dataclass(frozen=True, slots=True)
class Repeat:
    """`times` equal runs of `period` nodes, the first of which begins at position `start` of a sequence of nodes."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The position after the last of them."""
        return self.start + self.period * self.times


def boundaries(
    nodes: Sequence[Node], members: Sequence[int], homes: Mapping[int, Home], least: int = LEAST
) -> dict[int, str]:
    """Where to cut a region of `members`, if they are at least so many: the first node after each cut, and what is cut
    there, in words."""
    if len(members) < max(least, LEAST):
        return {}
    sequence = _Sequence(nodes, members, homes)
    cuts: dict[int, str] = {}
    open_parts = [(0, len(members))]
    while open_parts:
        low, high = open_parts.pop()
        if high - low < LEAST:
            continue
        found = longest(sequence.letters[low:high])
        if found is None:
            continue
        found = Repeat(found.start + low, found.period, found.times)
        for position in sequence.cut(found):
            cuts[members[position]] = f"{found.period} ops, {found.times} times"
        open_parts += [(low, found.start), (found.end, high)]
    return cuts


class _Sequence:
    """A region's nodes as letters, and what a cut between two of them would cost."""

    def __init__(self, nodes: Sequence[Node], members: Sequence[int], homes: Mapping[int, Home]):
        numbers: dict[object, int] = {}
        self._nodes = [nodes[i] for i in members]
        self._homes = homes
        self.letters = np.array([numbers.setdefault(_letter(node), len(numbers)) for node in self._nodes])

    def cut(self, repeat: Repeat) -> list[int]:
        """The positions at which to cut a repeat; none where a cut would cost more than it saves."""
        if repeat.end - repeat.start < LEAST:
            return []
        layers = -(-PART // repeat.period)  # in one region
        if repeat.times // layers < TIMES:
            return []
        crossing = self._crossing(repeat)
        at = repeat.start + np.arange(repeat.times) * repeat.period
        cost = np.array([sum(crossing[p - repeat.start] for p in at[1:-1] + shift) for shift in range(repeat.period)])
        shift = int(cost.argmin())
        first = self._nodes[repeat.start : repeat.start + repeat.period]
        if cost[shift] and not any(is_heavy(node) or _is_alone(node) for node in first):
            return []
        return [int(p) + shift for p in at[::layers] if p + shift < repeat.end]

    def _crossing(self, repeat: Repeat) -> np.ndarray:
        """For each position of a repeat: the bytes that are made before it and read soon after, within a period.

        What is read later (by the backward pass, say) has to be handed out wherever the cut is.
        """
        steps = np.zeros(repeat.end - repeat.start + 1)
        made: dict[int, int] = {}
        reads: dict[int, list[int]] = defaultdict(list)
        for position in range(repeat.start, repeat.end):
            for vid in operands(self._nodes[position]):
                if vid in made:
                    reads[vid].append(position)
            for result in self._nodes[position].results:
                made[result.vid] = position
        for vid, positions in reads.items():
            nbytes = nbytes_of(self._homes[vid])
            since = made[vid]
            for position in positions:  # in order: no part is counted twice
                since = max(since, position - repeat.period)
                steps[since + 1 - repeat.start] += nbytes
                steps[position + 1 - repeat.start] -= nbytes
                since = position
        return steps.cumsum()[:-1]


def _letter(node: Node) -> object:
    return node.signature[0], views(node)  # type: ignore[index]


def is_heavy(node: Node) -> bool:
    """Whether a node is a product or a convolution, with which XLA fuses nothing."""
    rule = rule_for(node.twin)
    return rule is not None and rule.cls in _HEAVY


def _is_alone(node: Node) -> bool:
    """Whether XLA makes loops of its own for a node, however many follow each other: it writes a part of a value, or
    looks for places. A thousand of them are a thousand loops to compile, and saved nothing by being one region."""
    rule = rule_for(node.twin)
    return any(r.base is not None for r in node.results) or (rule is not None and rule.cls in _ALONE)


def longest(letters: np.ndarray, least: int = LEAST) -> Repeat | None:
    """The tandem repeat that covers most of a string, and `least` letters of it; of those the one whose period is the
    shortest, and of those the first.
    """
    best, most = None, least - 1
    for period in range(1, len(letters) // TIMES + 1):
        equal = letters[:-period] == letters[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False]))))
        lengths = edges[1::2] - edges[::2]
        if not len(lengths):
            continue
        longest = int(lengths.argmax())
        times = int(lengths[longest]) // period + 1
        if times >= TIMES and times * period > most:
            best, most = Repeat(int(edges[::2][longest]), period, times), times * period
    return best
