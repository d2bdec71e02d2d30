"""Images: which values of a region lie by planes, as torch's do, and which by pixels, as XLA:CPU convolves them.

XLA:CPU convolves images whose channels lie together for each pixel, and what comes after is computed in that order
too. That is best for what goes on to the next convolution, as in an evaluation. Where more than one reads a result of a
convolution, as in training, it is turned once: sums over each channel and whatever leaves the region want planes. What
is computed from planes is turned again before the next convolution, or XLA would turn what it computes it from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from fused_eager.fusion_rules.lowering import Places
from fused_eager.fusion_rules.rule import OpClass, rule_for

from ...planning.plan import Region
from ...tracing.stream import Node

IMAGE = 3  # dimensions, at least: images, channels, and one for pixels


class Images:
    """Follows the values of a region while its nodes are lowered in order."""

    def __init__(self, nodes: Sequence[Node], region: Region):
        self._readers = Counter(region.outputs)
        for i in region.nodes:
            self._readers.update({use.vid for use in nodes[i].uses})
        self._planes = set(region.inputs)

    def places(self, node: Node, reads: Sequence[jax.Array]) -> Places:
        """How the operands of a node lie in memory, and what becomes of its results."""
        return Places(
            by_columns=[x for use, x in zip(node.uses, reads, strict=True) if use.geometry.is_by_columns],
            by_planes=[x for x, is_so in zip(reads, self.by_planes(node), strict=True) if is_so],
            is_kept=self.is_kept(node),
        )

    def is_kept(self, node: Node) -> bool:
        """Whether the result of a convolution is to lie by planes: others read it than one node of this region."""
        return any(self._readers[result.vid] > 1 for result in node.results)

    def by_planes(self, node: Node) -> list[bool]:
        """For each operand of a node, whether it lies by planes."""
        return [use.vid in self._planes for use in node.uses]

    def passed(self, node: Node) -> None:
        """A node has been lowered."""
        rule = rule_for(node.twin)
        if rule is not None and rule.cls is OpClass.CONVOLUTION:
            planes = self.is_kept(node)
        else:
            images = {use.vid for use in node.uses if len(use.geometry.size) >= IMAGE}
            planes = bool(images & self._planes)
        if planes:
            self._planes.update(result.vid for result in node.results)
