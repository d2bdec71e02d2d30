"""What lowering raises."""

from __future__ import annotations


class NodeFailed(Exception):
    """A node of the region cannot be lowered: `index` in the stream, and why; `lasting` if no process ever could."""

    def __init__(self, index: int, reason: str, lasting: bool = False):
        super().__init__(reason)
        self.index = index
        self.reason = reason
        self.lasting = lasting
