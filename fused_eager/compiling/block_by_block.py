"""Block by block: the executable of a block of rows, called for as many rows as there are.

Blocks are parts of the program's own memory, so nothing is copied or padded on the way in. The last block is a whole
one as well: it begins with rows that were computed before. What comes out of a block is copied to its place while it is
in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fused_eager.fusion_rules.deferred import jax

from ..devices.dlpack import to_array, to_tensor
from ..devices.home import Home, nbytes_of
from ..devices.host.device import HOST
from ..planning.plan import Region
from ..xla import device
from .executable import Executable
from .template import Template


class BlockByBlock:
    """The executable of a region of a template, for any number of rows."""

    def __init__(self, of: Template, region: Region, executable: Executable):
        self.block, self.call = of.block, executable.call
        self.inputs = [of.homes[v] if v in of.by_rows else None for v in region.inputs]

    def __call__(self, count: int, outputs: Sequence[Home], *arrays: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """All results, of so many rows. Returns when they are computed. The caller holds the runtime's lock."""
        values, numbers = arrays[:-2], arrays[-2:]
        jax.block_until_ready(values)
        results = [torch.empty(shape, dtype=dtype) for dtype, shape in outputs]
        places = [r.view(count, -1) for r in results]
        for begin, done in _turns(count, self.block):
            made, flags = self.call(*self._part(values, begin), *numbers)
            for place, part in zip(places, made, strict=True):
                place[done : begin + self.block] = to_tensor(part).view(self.block, -1)[done - begin :]
        return [to_array(r, device()) for r in results], flags

    def _part(self, values: Sequence[jax.Array], begin: int) -> Iterator[jax.Array]:
        """The arguments of the block that begins with a row."""
        for value, home in zip(values, self.inputs, strict=True):
            if home is None:
                yield value
            else:
                start = value.unsafe_buffer_pointer() + begin * (nbytes_of(home) // self.block)
                yield HOST.borrow(start, home, anew=True)


def _turns(count: int, block: int) -> Iterator[tuple[int, int]]:
    """Where each block begins, and the first of its rows that is not computed yet."""
    for begin in range(0, count - block, block):
        yield begin, begin
    yield count - block, (count - 1) // block * block
