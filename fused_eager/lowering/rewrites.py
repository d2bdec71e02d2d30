"""What lowering may do to a whole region on one platform and not on others, as a table beside the rows' own column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from fused_eager.fusion_rules.lowering import Places
from fused_eager.fusion_rules.platforms import Variants

from ..planning.plan import Region
from ..tracing.node import Node
from .xla_cpu import row_blocks
from .xla_cpu.images import Images
from .xla_tpu.readers import Readers


class Nowhere:
    """Follows no values: how they lie in memory is the compiler's own choice."""

    def __init__(self, nodes: Sequence[Node], region: Region):
        pass

    def places(self, node: Node, reads: Sequence[jax.Array]) -> Places:
        """Nothing is known."""
        return Places()

    def passed(self, node: Node) -> None:
        """A node has been lowered."""


LAYOUTS: Variants[Any] = Variants(
    "layouts that rows are told of", any=Nowhere, cpu=Images, tpu=Readers,
    why="products and images want to lie one way in memory; a product is fused with what follows in one shape",
)  # fmt: skip

# (whether a function of these arguments, pointwise or not, is worth a look; the function rewritten, and in words how)
Rewrite = tuple[Callable[[Sequence[Any], bool], bool], Callable[[ClosedJaxpr, Sequence[int]], tuple[Any, str]]]

REWRITE: Variants[Rewrite | None] = Variants(
    "rewrite of a traced region", any=None, cpu=(row_blocks.may_gain, row_blocks.in_blocks),
    why="loops over blocks of rows that stay in a cache",
)  # fmt: skip
